"""Timed slices of kernels: the least fraction, the phase that is cut, and the scale to the whole. Targets, programs and plans are fakes."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.resources import resources_of
from svod.core.ir.dtype import dtypes
from svod.core.machine.target import Target
from svod.tune.measure.slices import SLICE_SECONDS, WORTH_SLICING, full_run, least_fraction, least_part, part_of_run, wave_of
from tests.tune.search_kernels import elementwise, gemm

TARGET = Target("x86_64", "none", (), 32, 16, 32 << 10, 1 << 20, 32 << 20, 2)
WITHOUT_CACHES = replace(TARGET, l1=0, l2=0, l3=0)
# like an H100: 132 units with 2048 threads, 65536 registers and 228 KB of shared memory each
GPU = replace(WITHOUT_CACHES, threads=1, group_threads=1024, shared_bytes=227 << 10, subgroup=32, registers_per_thread=255,
              group_registers=65536, units=132, unit_threads=2048, unit_groups=32, unit_shared_bytes=228 << 10)


def program(*extents: int, once: tuple[int, ...] = (), threads: int = 2) -> ProgramSpec:
    """A program of phases with the given extents; the phases whose indices are in `once` run only once."""
    phases = tuple(PhaseSpec(f"p{i}", n, threads, 0, i in once) for i, n in enumerate(extents))
    return ProgramSpec("made up", ((dtypes.float32, 8),), (0,), (), phases)


class FakePlan:
    """A plan whose whole kernel takes `seconds` on a clock of its own; a slice takes its share of them."""

    def __init__(self, spec: ProgramSpec, seconds: float) -> None:
        self.spec, self.seconds, self.now, self.runs = spec, seconds, 0.0, 0
        self.ranges = [(0, p.extent) for p in spec.phases]

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        assert kernel == 0 and 0 <= begin < end <= self.spec.phases[phase].extent
        self.ranges[phase] = begin, end

    def repeat_timed(self, times: int, *, cold: bool = False) -> None:
        share = math.prod((end - begin) / p.extent for p, (begin, end) in zip(self.spec.phases, self.ranges, strict=True))
        self.now += times * self.seconds * share
        self.runs += times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: `clock(plan)` makes `slices` use the clock of the fake plan."""
    return lambda plan: monkeypatch.setattr("svod.tune.measure.slices.time.perf_counter", lambda: plan.now)


# -- the least fraction -------------------------------------------------------------------------------------------------------
def test_a_memory_bound_slice_stays_above_the_level_its_kernel_is_above() -> None:
    kernel = elementwise(4 << 20)
    size = kernel.nbytes
    assert size == 3 * 4 * (4 << 20)
    assert least_fraction(kernel, replace(TARGET, l3=16 << 20)) == pytest.approx(1.25 * (16 << 20) / size)
    # the whole kernel is in the last-level cache: a slice only must not fit the second level
    assert least_fraction(kernel, replace(TARGET, l3=64 << 20)) == pytest.approx(1.25 * (1 << 20) / size)
    # the cache is hardly smaller than the kernel: no smaller part exceeds it
    assert least_fraction(kernel, replace(TARGET, l3=size - 1)) == 1.0


def test_a_small_kernel_may_be_cut_as_small_as_one_likes() -> None:
    assert least_fraction(elementwise(64), TARGET) == 0.0


def test_the_last_level_does_not_count_for_a_compute_bound_kernel() -> None:
    kernel = gemm(512, 512, 512)
    size = kernel.nbytes
    assert size == 3 * 4 * 512 * 512
    target = replace(TARGET, l2=1 << 20, l3=2 << 20)
    assert least_fraction(kernel, target) == pytest.approx(1.25 * (1 << 20) / size)
    thin = gemm(512, 512, 2)
    assert least_fraction(thin, replace(target, l2=1 << 16, l3=1 << 20)) == pytest.approx(min(1.0, 1.25 * (1 << 20) / thin.nbytes))


# -- which phase --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("spec", "phase"), [(program(64), 0), (program(64, 32, once=(0,)), 1), (program(64, 32, once=(1,)), 0)])
def test_the_one_phase_that_runs_is_cut_in_its_middle(spec: ProgramSpec, phase: int) -> None:
    plan = FakePlan(spec, 1.0)
    extent = spec.phases[phase].extent
    assert part_of_run(plan, spec, 0.25) == 0.25  # type: ignore[arg-type]
    assert plan.ranges[phase] == (3 * extent // 8, 5 * extent // 8)
    assert all(r == (0, p.extent) for i, (r, p) in enumerate(zip(plan.ranges, spec.phases, strict=True)) if i != phase)
    full_run(plan, spec)  # type: ignore[arg-type]
    assert plan.ranges == [(0, p.extent) for p in spec.phases]


@pytest.mark.parametrize("spec", [program(64, 64), program(64, 64, 8, once=(2,)), program(64, once=(0,))])
def test_without_one_phase_that_runs_nothing_is_cut(spec: ProgramSpec) -> None:
    plan = FakePlan(spec, 10.0)
    assert least_part(gemm(64, 64, 64), spec, TARGET, 10.0, plan) == 1.0  # type: ignore[arg-type]
    assert least_part(gemm(64, 64, 64), spec, TARGET, None, plan) == 1.0  # type: ignore[arg-type]
    assert plan.runs == 0


# -- the scale ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("extent", "part", "count"), [(64, 0.25, 16), (7, 0.5, 4), (101, 0.001, 1), (13, 1.0, 13), (1, 0.3, 1)])
def test_the_share_is_what_runs_in_whole_iterations(extent: int, part: float, count: int) -> None:
    spec = program(extent)
    plan = FakePlan(spec, 3.0)
    share = part_of_run(plan, spec, part)  # type: ignore[arg-type]
    begin, end = plan.ranges[0]
    assert end - begin == count and share == count / extent
    plan.repeat_timed(1)
    assert plan.now / share == pytest.approx(3.0), "the time of the slice, scaled back, is that of the whole"


def test_a_slice_takes_a_millisecond_at_the_speed_of_the_incumbent() -> None:
    kernel, spec = gemm(64, 64, 64), program(10_000)
    plan = FakePlan(spec, 1.0)

    def part(incumbent: float) -> float:
        return least_part(kernel, spec, WITHOUT_CACHES, incumbent, plan)  # type: ignore[arg-type]
    assert part(0.1) == pytest.approx(SLICE_SECONDS / 0.1)
    assert part(0.99 * WORTH_SLICING) == 1.0, "short kernels are timed whole"
    assert part(1e3) == 4 * 2 / 10_000, "four iterations per core at least"
    assert plan.runs == 0


def test_few_iterations_are_not_cut() -> None:
    kernel, plan = gemm(64, 64, 64), FakePlan(program(15), 1.0)
    assert least_part(kernel, plan.spec, WITHOUT_CACHES, 1.0, plan) == 1.0  # type: ignore[arg-type]
    alone = FakePlan(program(15, threads=1), 1.0)
    assert least_part(kernel, alone.spec, WITHOUT_CACHES, 1.0, alone) < 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.01, 0.3, 60.0])
def test_without_an_incumbent_slices_grow_to_a_millisecond(seconds: float, clock: Any) -> None:
    """A kernel that takes a minute is never run as a whole, and only a few slices are tried."""
    spec = program(1_000_000)
    plan = FakePlan(spec, seconds)
    clock(plan)
    share = least_part(gemm(64, 64, 64), spec, WITHOUT_CACHES, None, plan)  # type: ignore[arg-type]
    assert seconds * share >= SLICE_SECONDS * (1 - 1e-9)
    assert plan.now < 0.05 * seconds + 8 * SLICE_SECONDS
    assert plan.runs <= 8


def test_a_kernel_that_turns_out_short_is_timed_whole(clock: Any) -> None:
    spec = program(1_000_000)
    plan = FakePlan(spec, 0.9 * WORTH_SLICING)
    clock(plan)
    assert least_part(gemm(64, 64, 64), spec, TARGET, None, plan) == 1.0  # type: ignore[arg-type]


# -- a grid of groups -----------------------------------------------------------------------------------------------------------
def grid(extent: int, block: int = 256, shared: int = 0) -> ProgramSpec:
    """A program of one phase: a grid of `extent` groups of `block` threads."""
    return ProgramSpec("made up", ((dtypes.float32, 8),), (0,), (), (PhaseSpec("p0", extent, 1, 0, block=block, shared_bytes=shared),))


class FakeDevice(FakePlan):
    """A device that runs a grid in waves of groups; every wave takes the same time, however few groups are in it."""

    def __init__(self, spec: ProgramSpec, wave: int, seconds: float) -> None:
        super().__init__(spec, seconds)
        self.wave = wave

    def repeat_timed(self, times: int, *, cold: bool = False) -> None:
        (begin, end), = self.ranges
        self.now += times * self.seconds * -(-(end - begin) // self.wave)
        self.runs += times


@pytest.mark.parametrize(("block", "registers", "shared", "resident"), [
    (256, None, 0, 8), (256, 32, 0, 8), (256, 128, 0, 2), (256, 250, 0, 1), (128, None, 100 << 10, 2), (1024, None, 0, 2),
    (32, None, 0, 32)])
def test_a_wave_is_the_groups_that_threads_registers_and_shared_memory_of_all_units_allow(block: int, registers: int | None, shared: int,
                                                                                        resident: int) -> None:
    phase = grid(9999, block, shared).phases[0]
    reports = [resources_of(GPU, replace(phase, symbol="another"), block, 255), resources_of(GPU, phase, block, registers)]
    assert wave_of(phase, GPU, reports) == 132 * resident


def test_a_wave_of_groups_of_several_iterations() -> None:
    """Iterations of one thread each, of which 128 run as one group."""
    phase = grid(9999, 1).phases[0]
    assert wave_of(phase, GPU, [resources_of(GPU, phase, 128, 32)]) == 132 * 2048


def test_a_driver_in_software_runs_a_group_on_each_core() -> None:
    assert wave_of(grid(9999).phases[0], replace(GPU, units=2, software_lanes=8), ()) == 2


@pytest.mark.parametrize("incumbent", [None, 0.005, 0.02, 1.0])
@pytest.mark.parametrize("extent", [1, 31, 32, 132, 1000, 7 * 264, 8 * 264 - 1, 8 * 264, 10_007, 123_457])
def test_of_a_grid_whole_waves_are_timed(extent: int, incumbent: float | None, clock: Any) -> None:
    """32 groups on 132 units take as long as 8 groups: the time of a part that is not whole waves cannot be scaled to the whole."""
    spec, wave = grid(extent), 2 * 132
    plan = FakeDevice(spec, wave, (incumbent or 0.02) / -(-extent // wave))
    clock(plan)
    kernel, reports = gemm(64, 64, 64), [resources_of(GPU, spec.phases[0], spec.phases[0].block, 128)]
    part = least_part(kernel, spec, GPU, incumbent, plan, reports)  # type: ignore[arg-type]
    if extent < 8 * wave:
        assert part == 1.0
        return
    assert part <= 0.5
    share = part_of_run(plan, spec, part)  # type: ignore[arg-type]
    (begin, end), = plan.ranges
    assert (end - begin) % wave == 0 and end - begin >= 4 * wave
    plan.now = 0.0
    plan.repeat_timed(1)
    assert plan.now / share == pytest.approx(plan.seconds * extent / wave)
