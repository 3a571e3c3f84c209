"""The records that ship with svod: valid, anonymous, and not for kernels of the benchmarks."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from svod.tune.db import KernelRecord, Measurement, OriginRecord, Record, Search, Verdict
from svod.tune.db.layers import shipped_files
from svod.tune.db.transfer import read_records
from svod.tune.db.winners import rank_winners

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def shipped() -> list[Record]:
    return [r for path in shipped_files() for r in read_records(path)[0]]


def test_every_record_can_be_read_and_names_nobody() -> None:
    for path in shipped_files():
        records, skipped = read_records(path)
        assert records and not skipped
        assert not any(isinstance(r, (Search, OriginRecord)) for r in records)
        assert not any(v.by or v.search for v in records if isinstance(v, Verdict))
        assert not any(m.search or set(m.host) - {"sizes"} for m in records if isinstance(m, Measurement))


def test_every_measurement_decides_about_a_described_kernel() -> None:
    records = shipped()
    described = {k.kernel for k in records if isinstance(k, KernelRecord)}
    measurements, verdicts = ([r for r in records if isinstance(r, kind)] for kind in (Measurement, Verdict))
    for kernel, target in {(m.kernel, m.target) for m in measurements if isinstance(m, Measurement)}:
        assert kernel in described
        assert rank_winners([m for m in measurements if isinstance(m, Measurement) and (m.kernel, m.target) == (kernel, target)],
                            [v for v in verdicts if isinstance(v, Verdict) and (v.kernel, v.target) == (kernel, target)], {})


@pytest.mark.slow
def test_no_kernel_of_the_benchmarks_or_the_experiments_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXPERIMENTS), *sys.path])
    import heuristics

    from svod.bench.suites.suites import select_cases

    measured = {kernel.key for case in select_cases("core,odd,models") for _, kernel in heuristics.kernels_of(case)}
    import shipped as made
    assert not measured & set(made.kernels()), "experiments/shipped.py would ship them"
    assert not measured & {m.kernel for m in shipped() if isinstance(m, Measurement)}
