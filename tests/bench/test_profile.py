"""`svod.profile` on made-up plans and clocks, and once on a real plan, of which the times are not checked."""
from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.bench.profile import Profile, layer_path, profile, roll_up
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PreparedKernel
from svod.core.cost.op_count import Work
from svod.core.ir.dtype import dtypes
from svod.errors import ArgumentError, LaunchError
from tests.bench.counted import Counted
from tests.bench.example_run import CEILINGS

EMPTY_CALL = 1e-6


def kernel(name: str, origin: str, flops: int = 512_000_000, moved: int = 1000) -> PreparedKernel:
    spec = ProgramSpec(name, ((dtypes.float32, 4), (dtypes.float32, 4)), (0,), (), (PhaseSpec(name, 1, 1, 0),), ())
    return PreparedKernel(spec, None, (0, 1), name, f"key of {name}", (("UPCAST", "o0", 8),), "heuristic", "", origin,  # type: ignore[arg-type]
                          form=Counted(Work(((dtypes.float32, flops),), 0, moved, 0)))


@dataclass
class FakePlan(ExecutionPlan):
    """A plan in which kernel i takes seconds[i]; a call costs a microsecond."""

    timed: tuple[PreparedKernel, ...]
    seconds: tuple[float, ...]
    threads: int = 2
    device: str = "CPU"
    lock: Any = field(default_factory=threading.RLock)
    now: float = 0.0
    hiccup: int = -1                # number of the call that takes a second longer; -1 for none
    calls: int = 0
    runs: int = 0
    owed: float = 0.0               # seconds of work that was started and not waited for

    @property
    def kernels(self) -> tuple[PreparedKernel, ...]:
        return self.timed

    def clock(self) -> float:
        return self.now

    def repeat_kernel(self, index: int, times: int) -> None:
        self.calls += 1
        self.now += EMPTY_CALL + times * self.seconds[index] + (1.0 if self.calls == self.hiccup else 0.0)

    def variable_values(self) -> dict[str, int]:
        return {}

    def execute(self) -> None:
        self.runs += 1
        self.now += EMPTY_CALL
        self.owed = 0.5 * sum(self.seconds)         # some kernels run at the same time

    def wait(self) -> None:
        """Add the time of started work, which a wait takes."""
        self.now, self.owed = self.now + self.owed, 0.0


KERNELS = (kernel("conv", "layer1.0.conv1"), kernel("pool", "maxpool", 0, 52_000_000), kernel("conv", "layer1.0.conv2"),
           kernel("add", "layer1.0"), kernel("fc", ""))
SECONDS = (3e-3, 2e-3, 1e-3, 5e-4, 5e-4)


def of(plan: FakePlan) -> Profile:
    return profile(plan, seconds=0.1, ceilings=CEILINGS, clock=plan.clock)


def test_kernels() -> None:
    p = of(FakePlan(KERNELS, SECONDS))
    assert [k.seconds for k in p.kernels] == pytest.approx(SECONDS)          # the time of the empty call is subtracted
    assert p.kernel_seconds == pytest.approx(7e-3) and p.plan_seconds == pytest.approx(3.5e-3 + EMPTY_CALL)
    assert [k.share for k in p.kernels] == pytest.approx([s / 7e-3 for s in SECONDS])
    conv, pool = p.kernels[:2]
    assert conv.bound == pytest.approx(1e-3) and conv.ceiling_share == pytest.approx(1 / 3)       # 512 GFLOP/s
    assert pool.bound == pytest.approx(1e-3) and pool.ceiling_share == pytest.approx(0.5)         # 52 GB/s
    assert conv.flops_per_second == pytest.approx(512_000_000 / 3e-3) and pool.bytes_per_second == pytest.approx(52_000_000 / 2e-3)
    (row,) = (line for line in str(p).splitlines() if line.startswith("pool"))
    assert row.split()[:7] == ["pool", "2.00", "ms", "29", "%", "–", "26.0"]
    assert p.to_json()["kernels"][0]["flops_per_second"] == conv.flops_per_second
    assert (conv.key, conv.source, conv.chain, conv.flops) == ("key of conv", "heuristic", (("UPCAST", "o0", 8),), 512_000_000)


def test_the_median_forgets_a_hiccup() -> None:
    plan = FakePlan(KERNELS, SECONDS, hiccup=2)
    assert [k.seconds for k in of(plan).kernels] == pytest.approx(SECONDS)


def test_layers_inclusive_and_exclusive() -> None:
    layers = {x.path: x for x in of(FakePlan(KERNELS, SECONDS)).layers}
    assert list(layers) == ["layer1", "layer1.0", "layer1.0.conv1", "layer1.0.conv2", "maxpool", "(no origin)"]
    assert [x.depth for x in layers.values()] == [0, 1, 2, 2, 0, 0]
    assert layers["layer1"].inclusive == pytest.approx(4.5e-3) and layers["layer1"].exclusive == 0.0 and layers["layer1"].kernels == 3
    assert layers["layer1.0"].exclusive == pytest.approx(5e-4) and layers["layer1.0"].share == pytest.approx(4.5 / 7)
    assert layers["layer1"].ceiling_share == pytest.approx(3e-3 / 4.5e-3)
    tops = [x for x in layers.values() if x.depth == 0]
    assert sum(x.inclusive for x in tops) == pytest.approx(7e-3) == pytest.approx(sum(x.exclusive for x in layers.values()))


def test_paths_of_origins() -> None:
    assert layer_path("a.b.c") == ("a", "a.b", "a.b.c")
    assert layer_path("/home/me/my.model.py:12") == ("my.model.py", "my.model.py:12")
    assert layer_path("") == ("(no origin)",)
    assert roll_up(()) == ()


def test_work_that_is_not_known_has_no_bound() -> None:
    plain = PreparedKernel(KERNELS[0].spec, KERNELS[0].loaded, (0, 1), "k", origin="a.b")
    p = of(FakePlan((KERNELS[0], plain), (1e-3, 1e-3)))
    assert p.kernels[1].bound is None and p.kernels[1].flops is None
    assert [x.ceiling_share for x in p.layers if x.path == "a"] == [None]
    assert "a" in p.table()


def test_json_is_plain_data() -> None:
    p = of(FakePlan(KERNELS, SECONDS))
    data = json.loads(json.dumps(p.to_json()))
    assert data["format"] == "svod-profile" and data["version"] == 1 and data["threads"] == 2
    assert data["kernels"][0]["origin"] == "layer1.0.conv1" and data["kernels"][0]["chain"] == [["UPCAST", "o0", 8]]
    assert data["layers"][1]["path"] == "layer1.0" and data["layers"][1]["ceiling_share"] == pytest.approx(p.layers[1].ceiling_share)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_table_fits(width: int) -> None:
    long = kernel("a_kernel_with_quite_a_long_name_indeed", "encoder.layers.11.attention.output.projection.with.many.parts.in.its.path")
    text = of(FakePlan((*KERNELS, long), (*SECONDS, 9e-3))).table(width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("plan 8.00 ms, 6 kernels 16.0 ms one by one, 2 threads")
    assert lines[4].startswith("a_kernel") and "56 %" in lines[4]           # the one that takes longest comes first
    assert any(line.startswith("    conv1") for line in lines)
    assert "and 4 more kernels" in of(FakePlan((*KERNELS, long), (*SECONDS, 9e-3))).table(top=2)


def test_a_kernel_that_takes_less_than_an_empty_call_is_not_said_to_take_nothing() -> None:
    p = of(FakePlan(KERNELS, (3e-3, 2e-3, 1e-3, 5e-4, 0.0)))
    (row,) = (line for line in str(p).splitlines() if line.startswith("fc"))
    assert p.least == pytest.approx(EMPTY_CALL) and row.split()[1] == "<"


def test_a_plan_without_kernels() -> None:
    with pytest.raises(LaunchError, match="no kernels"):
        of(FakePlan((), ()))


def test_a_real_plan() -> None:
    def model(x: Tensor) -> Tensor:
        with svod.scope("block"):
            with svod.scope("product"):
                y = x @ x
            with svod.scope("rows"):
                return y.softmax(-1)
    f = svod.jit(model)
    f(np.ones((17, 17), np.float32))
    p = svod.profile(f.plans[0], seconds=0.0, ceilings=CEILINGS)
    assert len(p.kernels) == len(f.plans[0].kernels) and p.passes >= 5
    assert p.layers[0].path == "block" and p.layers[0].kernels == len(p.kernels)
    assert all(k.share >= 0.0 for k in p.kernels)
    assert "block" in str(p)


class FakeFunction:
    """A function that runs its first plan and takes two milliseconds more."""

    def __init__(self, *plans: FakePlan) -> None:
        self.plans = plans

    def __call__(self, rows: int) -> int:
        self.plans[0].execute()
        self.plans[0].now += 2e-3 * rows
        return rows


def test_what_a_caller_waits_for() -> None:
    plan = FakePlan(KERNELS, SECONDS)
    p = profile(FakeFunction(plan, FakePlan(KERNELS, SECONDS)), 1, seconds=0.1, ceilings=CEILINGS, clock=plan.clock)
    assert p.call_seconds == pytest.approx(p.plan_seconds + 2e-3) and p.to_json()["call_seconds"] == p.call_seconds
    assert p.table().splitlines()[1] == ("call 5.50 ms as the caller waits: 2.00 ms (36 %) for arguments, checks and results, the rest for "
                                         "the plan")
    assert of(FakePlan(KERNELS, SECONDS)).call_seconds is None


def test_a_call_of_a_jitted_function_is_profiled() -> None:
    f = svod.jit(lambda x: x * 2 + 1)
    f(np.ones(3, np.float32))
    x = np.ones((4, 4), np.float32)
    p = svod.profile(f, x, seconds=0.01)
    assert p.call_seconds is not None and p.call_seconds > p.plan_seconds > 0
    assert len(f.plans) == 2 and f.plans[1].runs > p.passes and len(p.kernels) == 1
    with pytest.raises(ArgumentError, match="got ExecutionPlan and arguments"):
        svod.profile(f.plans[0], x)     # type: ignore[arg-type]
