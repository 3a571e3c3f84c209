"""Measured rates of dot instructions: results of the timed loops, rates computed from times, and the file that stores them."""
from __future__ import annotations

import ctypes
import json
import logging
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest

from svod.compile.cpu import dot_rates
from svod.compile.cpu.backend import BACKEND
from svod.compile.cpu.dot_rates import ACCUMULATORS, DOT_COSTS, cost_of, kept_cost, turns
from svod.compile.cpu.host import host_target, make_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.linear import validate
from svod.core.ir.dtype import dtypes, to_numpy
from svod.core.machine.isa import DOTS
from tests.interpreted import interpret

TARGET = make_target("x86_64", "znver5", ("avx2", "avx512f", "bf16", "fma", "sse4", "vnni"), (48 << 10, 1 << 20, 32 << 20), 4)
VECTORS = [name for name, dot in DOTS.items() if not dot.is_tile]
HERE = [name for name in VECTORS if DOTS[name].runs_on(host_target())]
COUNT = 7


def test_the_loop_of_multiply_adds() -> None:
    x = np.linspace(0, 1, 16, dtype=np.float32)
    got = x.copy()
    program = turns(TARGET, dtypes.float32, None, COUNT)
    validate(program)
    interpret(program, [got])
    np.testing.assert_allclose(got, sum(range(ACCUMULATORS)) + ACCUMULATORS * COUNT * x.astype(np.float64) ** 2, rtol=1e-4)


def argument_and_sums(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the argument of an instruction's loop in memory form, and the sums that its iterations add: small integers, so sums are
    exact."""
    dot = DOTS[name]
    x = np.random.default_rng(3).integers(0, 100, (16, dot.group))
    sums = sum(range(ACCUMULATORS)) + ACCUMULATORS * COUNT * (x ** 2).sum(1)
    if dot.operands[0] == dtypes.bfloat16:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1), sums.astype(np.float32)
    return x.astype(to_numpy(dot.operands[0])).reshape(-1), sums.astype(np.int32)


@pytest.mark.parametrize("name", VECTORS)
def test_the_loop_of_an_instruction(name: str) -> None:
    got, sums = argument_and_sums(name)
    program = turns(TARGET, DOTS[name].operands[0], DOTS[name], COUNT)
    validate(program)
    interpret(program, [got])
    np.testing.assert_array_equal(got.view(sums.dtype), sums)


@pytest.mark.parametrize("name", HERE)
def test_the_loop_as_it_is_timed(name: str) -> None:
    """The loop with an instruction of this machine gives the right sums after all iterations."""
    target = host_target()
    x, sums = argument_and_sums(name)
    area = ctypes.create_string_buffer(64 + x.nbytes)
    address = -(-ctypes.addressof(area) // 64) * 64
    ctypes.memmove(address, x.ctypes.data, x.nbytes)
    program = turns(target, DOTS[name].operands[0], DOTS[name], COUNT)
    with LoadedProgram(compile_object(render(program, target), target), ("svod_p0",)) as code:
        call_phase(code.addresses[0], (address,), (), 0, 0, COUNT)
    np.testing.assert_array_equal(np.frombuffer(ctypes.string_at(address, x.nbytes), sums.dtype), sums)


@pytest.mark.parametrize("times", [(2e-4, 2e-4, 1.0), (2e-4, 2.8e-4, 1.0), (2e-4, 2.9e-4, 2.0), (1e-4, 3.94e-4, 4.0), (2e-4, 1.1e-4, 0.5),
                                   (2e-4, 1e-6, 0.5), (1e-4, 1.0, 16.0)])
def test_the_nearest_power_of_two(times: tuple[float, float, float]) -> None:
    multiply_adds, dots, cost = times
    assert cost_of(multiply_adds, dots) == cost and cost in DOT_COSTS


def test_the_loops_are_long_beside_a_call() -> None:
    """An error of two microseconds, the overhead of a call, does not change the rounded rate, not even on a core of 6 GHz with four
    multiply-adds per cycle."""
    least = dot_rates.TURNS * ACCUMULATORS / 4 / 6e9
    for cost in (2.0, 4.0, 8.0):
        assert cost_of(least + 4e-6, cost * least + 2e-6) == cost_of(least + 2e-6, cost * least + 4e-6) == cost


def test_a_cost_is_measured_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, measured = tmp_path / "deep" / "dot_rates.json", list[str]()

    def measure(name: str) -> tuple[float, float]:
        measured.append(name)
        return 1.0, float(2 ** len(measured))

    assert kept_cost(path, "bf16", measure) == kept_cost(path, "bf16", measure) == 2.0 and measured == ["bf16"]
    assert kept_cost(path, "vnni8", measure) == 4.0 and kept_cost(path, "bf16", measure) == 2.0
    monkeypatch.setenv("SVOD_THREADS", "1")
    assert kept_cost(path, "bf16", measure) == 2.0, "how many threads are asked for makes no other machine"

    def late(name: str) -> tuple[float, float]:
        kept_cost(path, name, lambda _: (1.0, 8.0))
        return 1.0, 1.0
    assert kept_cost(path, "vnni16", late) == 8.0, "another process has measured and kept it meanwhile"
    assert sorted(json.loads(path.read_text()).values()) == [2.0, 4.0, 8.0]


@pytest.mark.parametrize("damage", ["", "{", "[]", "\x00", "null", "3", "null of", "text of", "3.0 of", "list of", "nan of"])
def test_a_damaged_record_is_measured_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "dot_rates.json"
    assert kept_cost(path, "bf16", lambda _: (1.0, 4.0)) == 4.0
    key, = json.loads(path.read_text())
    values = {"null of": None, "text of": "4.0", "3.0 of": 3.0, "list of": [4.0], "nan of": float("nan")}
    path.write_text(json.dumps({key: values[damage], "another": 1}) if damage in values else damage)
    assert kept_cost(path, "bf16", lambda _: (1.0, 2.0)) == 2.0
    assert json.loads(path.read_text()) == ({key: 2.0, "another": 1} if damage in values else {key: 2.0}), "mended, others are left"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_kept_is_measured_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert kept_cost(tmp_path / "file" / "dot_rates.json", "bf16", lambda _: (1.0, 4.0)) == 4.0
        assert kept_cost(tmp_path / "file" / "dot_rates.json", "bf16", lambda _: (1.0, 2.0)) == 2.0
    assert "cannot be written" in caplog.text
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert kept_cost(tmp_path / "closed" / "dot_rates.json", "bf16", lambda _: (1.0, 16.0)) == 16.0
    finally:
        (tmp_path / "closed").chmod(stat.S_IRWXU)


@pytest.mark.parametrize("name", HERE[:1])
def test_the_analysis_of_states_takes_what_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost analysis uses the recorded rate, 16 here, and does not measure."""
    monkeypatch.setattr(dot_rates, "data_dir", lambda: tmp_path)
    assert kept_cost(tmp_path / "dot_rates.json", name, lambda _: (1.0, 16.0)) == 16.0
    dot_rates.measured_cost.cache_clear()
    try:
        assert DOTS[name].cost(BACKEND.target()) == 16.0
    finally:
        dot_rates.measured_cost.cache_clear()


@pytest.mark.parametrize("name", HERE[:1])
def test_both_loops_are_timed(name: str) -> None:
    """Both loops have the same number of instructions, and take at least a cycle of 6 GHz for each four of them."""
    assert all(seconds > dot_rates.TURNS * ACCUMULATORS / 4 / 6e9 for seconds in dot_rates.measure_times(name))


def test_what_was_measured_is_no_part_of_the_identity() -> None:
    here, travelled = BACKEND.target(), pickle.loads(pickle.dumps(BACKEND.target()))
    assert travelled == here and hash(travelled) == hash(here) and travelled.key == here.key
    assert "dot_cost" not in repr(here) and "dot_cost" not in here.key
    assert all(d.cost(here) == d.base_cost for d in DOTS.values() if d.is_tile), "tiles cost what their cycles say"
