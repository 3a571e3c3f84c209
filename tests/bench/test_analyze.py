"""`plan.analyze()` against numbers worked out by hand; nothing is run or timed."""
from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from svod import Tensor
from svod.bench.analyze import Dependency, critical_path
from svod.bench.ceiling_loops import CurvePoint
from svod.bench.roofline import Ceilings
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel
from svod.config import NONE, PrepareConfig
from svod.core.cost.op_count import Work
from svod.core.ir.dtype import dtypes
from svod.core.schedule.regions import Region
from tests.bench.counted import Counted
from tests.compile import loop_kernels

N = 97                          # number of int64s in a buffer: 776 bytes, which the planner rounds up to 832
# 1 GFLOP/s of float64 per core; any working set is read at 4 GB/s, half of that by one core; a launch takes 1 µs, with two threads 2 µs
LIMITS = Ceilings("t", 2, False, {"float32": (2e9, 4e9), "float64": (1e9, 2e9)},
                  {"memory": {"read": (0.5e9, 1e9), "copy": (0.5e9, 1e9)}}, (1e-6, 2e-6),
                  (CurvePoint(1000, 4e9, 4e9),))


def kernel(name: str, buffers: tuple[int, ...], flops: int, moved: tuple[int, int], threads: int = 1, **more: object) -> PreparedKernel:
    spec = loop_kernels.spec(name, N, slots=len(buffers), threads=threads, scratch=more.pop("scratch", 0))
    form = Counted(Work(((dtypes.int64, flops),), 0, *moved))
    return PreparedKernel(spec, loop_kernels.loaded(name), buffers, name, form=form, **more)  # type: ignore[arg-type]


def branches(more: int = 1) -> ExecutionPlan:
    """The graph x → a → (b, c) → y, after which x is overwritten: b and c share a level. `more`: a factor of their operations."""
    buffers = [PlanBuffer(8 * N, "output", np.zeros(N, np.int64)), *[PlanBuffer(8 * N, "intermediate")] * 3,
               PlanBuffer(8 * N, "output", np.zeros(N, np.int64))]
    kernels = [kernel("affine", (1, 0), 1000, (776, 776), level=0, cut="why a"),
               kernel("affine", (2, 1), 10_000 * more, (776, 776), level=1, cut="why b", scratch=100),
               kernel("affine", (3, 1), 3000 * more, (776, 776), level=1, cut="why c"),
               kernel("sum", (4, 2, 3), 40_000, (2 * 776, 776), level=2, threads=2, scratch=64),
               kernel("affine", (0, 4), 0, (776, 776), level=3)]
    return ExecutionPlan(kernels, buffers, [4], threads=2)


def test_dependencies() -> None:
    found = branches().analyze(LIMITS).dependencies
    assert found == (Dependency(0, 1, "data", 1, 776), Dependency(0, 2, "data", 1, 776), Dependency(1, 3, "data", 2, 776),
                     Dependency(2, 3, "data", 3, 776), Dependency(0, 4, "control", 0, 776), Dependency(3, 4, "data", 4, 776))


def test_estimates_and_the_critical_path() -> None:
    a = branches().analyze(LIMITS)
    moved = 1552 / 2e9
    seconds = [k.seconds for k in a.kernels]
    assert seconds[0] == pytest.approx(1e-6 + 1e-6) and a.kernels[0].bound_by in ("compute", "launch")
    assert seconds[1] == pytest.approx(10e-6 + 1e-6) and a.kernels[1].bound_by == "compute"
    assert seconds[2] == pytest.approx(3e-6 + 1e-6)
    assert seconds[3] == pytest.approx(20e-6 + 2e-6) and a.kernels[3].threads == 2
    assert seconds[4] == pytest.approx(moved + 1e-6) and a.kernels[4].bound_by == "launch"
    assert a.critical_path == (0, 1, 3, 4) and a.critical_seconds == pytest.approx(2e-6 + 11e-6 + 22e-6 + 1e-6 + moved)
    assert a.seconds == pytest.approx(a.critical_seconds + 4e-6) and a.parallelism == pytest.approx(a.seconds / a.critical_seconds)


def test_launches_of_one_level_are_one_if_they_take_long() -> None:
    """The sum uses two threads. b and c share a launch unless waking a core for the shorter one takes longer than the kernel."""
    short, long = branches().analyze(LIMITS), branches(10).analyze(LIMITS)
    assert (short.launches, short.synchronisations, short.threads) == (5, 1, 2)
    assert (long.launches, long.synchronisations, long.threads) == (4, 2, 2)


def test_memory_and_what_fusions_would_save() -> None:
    """a is alive at levels 0–1, b and c at 1–2: three buffers at level 1, of 832 bytes each as they are placed."""
    a = branches().analyze(LIMITS)
    assert (a.memory.lower_bound, a.memory.peak, a.memory.mode) == (3 * 832, 3 * 832, "arena")
    assert a.memory.outputs == 2 * 776 and a.memory.inputs == a.memory.constants == a.memory.kept == 0
    assert [(f.producer, f.consumers, f.buffer, f.bytes, f.traffic, f.peak_saved, f.why) for f in a.fusions] == [
        (0, (1, 2), 1, 776, 3 * 776, 832, "why a"), (1, (3,), 2, 776, 2 * 776, 832, "why b"), (2, (3,), 3, 776, 2 * 776, 832, "why c")]
    assert [(t.kernel, t.kind, t.bytes) for t in a.transfers] == [(4, "copy", 2 * 776)]
    assert [k.scratch_bytes for k in a.kernels] == [0, 100, 0, 128, 0]


def test_critical_path_of_what_is_not_known() -> None:
    assert critical_path([], ()) == ((), 0.0)
    chain = [Dependency(0, 1, "data", 0, 1)]
    assert critical_path([2.0, 3.0, 4.0], chain) == ((0, 1), 5.0)
    assert critical_path([2.0, None, 4.0], chain) == ((2,), None)
    plan = branches()
    plan._runs.kernels = (replace(plan.kernels[0], form=None), *plan.kernels[1:])
    a = plan.analyze(LIMITS)
    assert a.seconds is None and a.critical_seconds is None and a.parallelism is None and a.kernels[0].flops is None
    assert "critical path –" in a.table()


def test_a_plan_is_looked_at_while_nobody_gives_it_values() -> None:
    plan = branches()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(plan.analyze(LIMITS)))
    with plan.lock:
        thread.start()
        thread.join(0.05)
        assert not found
    thread.join()
    assert found


@pytest.mark.parametrize("width", [60, 90, 140])
def test_table_and_json(width: int) -> None:
    a = branches().analyze(LIMITS)
    lines = a.table(width).split("\n")
    assert max(map(len, lines[:6])) <= max(width, 99) and lines[0].startswith("kernel") and lines[2].startswith("0 affine")
    assert "4 → " not in a.table() and "0 → 1, 2" in a.table() and "why a" in str(a)
    assert "and 2 more" in a.table(width, fusions=1)
    plain = json.loads(json.dumps(a.to_json()))
    assert plain["format"] == "svod-analysis" and plain["critical_path"] == [0, 1, 3, 4] and len(plain["kernels"]) == 5
    assert plain["memory"]["lower_bound"] == 2496 and plain["fusions"][0]["consumers"] == [1, 2]


def test_a_plan_from_tensors() -> None:
    """softmax(x @ w): a product of 2·16·24·8 operations that is read twice along its row, and its softmax."""
    rng = np.random.default_rng(0)
    x, w = (Tensor(rng.standard_normal(s, np.float32)) for s in ((16, 8), (8, 24)))
    plan = (x @ w).softmax(-1).prepare(config=PrepareConfig(db=NONE, threads=1))
    a = plan.analyze(LIMITS)
    assert len(a.kernels) == 2 and [d.kind for d in a.dependencies] == ["data"]
    product, rows = a.kernels
    assert (product.flops, product.bytes_read, product.bytes_written) == (2 * 16 * 24 * 8, 4 * (16 * 8 + 8 * 24), 4 * 16 * 24)
    assert rows.bytes_read == rows.bytes_written == 4 * 16 * 24
    (fusion,) = a.fusions
    assert fusion.bytes == 4 * 16 * 24 and fusion.traffic == 2 * fusion.bytes and "reduction" in fusion.why
    assert a.memory.lower_bound == a.memory.peak >= 4 * 16 * 24 and a.memory.outputs == 4 * 16 * 24
    assert a.critical_path == (0, 1)
    assert [k.resources for k in a.kernels] == [None, None] and "occupancy" not in a.table(), "a CPU has no groups of threads"


def test_kernels_that_put_a_buffer_together_do_not_wait_for_each_other() -> None:
    """Two columns of a matrix, then all of it, then the first column anew."""
    columns = [Region(8 * c, 8, ((16, N),)) for c in range(2)]
    whole, half = Region(0, 16 * N), Region(0, 8 * N)
    buffers = [PlanBuffer(16 * N, "output", np.zeros(2 * N, np.int64)), PlanBuffer(16 * N, "output", np.zeros(2 * N, np.int64))]
    kernels = [kernel("affine", (0, 1), 0, (776, 776), level=0, regions=(columns[0], half)),
               kernel("affine", (0, 1), 0, (776, 776), level=0, regions=(columns[1], half)),
               kernel("affine", (1, 0), 0, (776, 776), level=1, regions=(whole, whole)),
               kernel("affine", (0, 1), 0, (776, 776), level=2, regions=(columns[0], half))]
    data = [(d.before, d.after) for d in ExecutionPlan(kernels, buffers, [0]).analyze(LIMITS).dependencies if d.kind == "data"]
    control = [(d.before, d.after) for d in ExecutionPlan(kernels, buffers, [0]).analyze(LIMITS).dependencies if d.kind == "control"]
    assert data == [(0, 2), (1, 2), (2, 3)] and control == [(0, 2), (1, 2), (2, 3)]
