"""Verification under the policy "same": a candidate that adds in another order is wrong, however small its error is."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from svod.compile.lower.lower import lower
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import SAME, Target
from svod.tune.measure import work
from svod.tune.measure.context import Setup
from svod.tune.measure.measurer import Verification
from svod.tune.measure.verify import Baseline, GuardedBuffers, Reference, verify
from tests.compile.native import AVX2
from tests.core.corpus import data, kernel_of
from tests.interpreted import interpret

TARGET = replace(AVX2, numerics=SAME)
ROW_SUMS = kernel_of(data(5, 100).sum(1))


def judged(target: Target, baseline: Baseline | None, keep: Baseline | None, *chain: Opt) -> Verification:
    kernel = Kernel(ROW_SUMS)
    program = lower(apply_opts(Scheduler(kernel, target), chain))
    return verify(Reference(kernel), lambda arrays: interpret(program, arrays), GuardedBuffers(kernel), baseline, keep, same_bits=True)


def test_another_order_is_wrong() -> None:
    """The untouched kernel without the policy adds one number after the other: right within its error bound, but with other bits."""
    kept = Baseline([])
    assert judged(TARGET, None, kept).right and judged(TARGET, kept, None, Opt("UPCAST", "o0", 2)).right
    assert judged(AVX2, None, None).right
    verdict = judged(AVX2, kept, None)
    assert verdict.right is False and "have other bits than the baseline's with reals" in verdict.reason


@pytest.mark.parametrize("nan", [0x7FC00000, 0xFFC12345])
def test_all_nans_are_equal(nan: int) -> None:
    kernel = Kernel(ROW_SUMS)
    buffers = GuardedBuffers(kernel)
    out = buffers.arrays[0]
    out[:] = np.nan
    want = out.copy()
    want[:1].view(np.uint32)[:] = nan
    from svod.tune.measure.verify import InputSet, _other_bits  # the comparison alone, as no kernel makes such NaNs on purpose

    assert not _other_bits(buffers, {0: want}, InputSet("reals", "reals", -1, 1, 0))
    want[1] = 0.0
    assert "1 elements" in _other_bits(buffers, {0: want}, InputSet("reals", "reals", -1, 1, 0))


def test_workers_compare_with_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker compares small kernels with the baseline too, whose whole output the reference decides otherwise."""
    asked: list[Any] = []

    def verified(reference: Reference, run: Any, buffers: Any, baseline: Any, keep: Any, same_bits: bool) -> Verification:
        asked.append((baseline is not None, same_bits))
        return Verification(True, "")
    monkeypatch.setattr(work, "verify", verified)
    for target in (TARGET, AVX2):
        context = work.verify_candidate_setup(Setup(ast_to_data(ROW_SUMS), target))
        chains: Sequence[Sequence[Any]] = ([], [["UPCAST", "o0", 2]])
        first, second = (_built(context, chain) for chain in chains)
        work.verify_candidate((first, None, ((),), 10.0), context)
        work.verify_candidate((second, first, ((),), 10.0), context)
        context.close()
    assert asked == [(False, True), (True, True), (False, False), (False, False)]


def _built(context: Any, chain: Sequence[Any]) -> Any:
    return work.compile_candidate((chain, False), context)
