"""The cost analysis of states: finite for every state, equal for equal states, and correct where it can be counted by hand."""
from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from svod.core.cost.cost import Cost
from svod.core.cost.cpu import CPU, IssuePricer, bounds_of, cost_of, within, work_of
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from tests.chains import random_state
from tests.compile.native import AVX2, AVX512, BASELINE
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import a_half
from tests.hand_kernels import HAND, gemm, lines, softmax

KERNELS = {**CORPUS, **HAND}
TARGETS = [replace(t, threads=4) for t in (BASELINE, AVX2, AVX512)]
TARGET = TARGETS[-1]


def features_of(kernel: Kernel, chain: list[list[Any]]) -> Cost:
    return cost_of(apply_opts(Scheduler(kernel, TARGET), [Opt.from_json(o) for o in chain]))


def loads_per_multiply_add(kernel: Kernel, chain: list[list[Any]]) -> float:
    work, *_ = work_of(apply_opts(Scheduler(kernel, TARGET), [Opt.from_json(o) for o in chain]))
    return sum(work.runs(n.deps) for _, n, is_load in work.values() if is_load) / work.multiply_adds


@pytest.mark.parametrize("name", a_half(KERNELS))
def test_any_state_has_finite_positive_features(name: str) -> None:
    kernel = Kernel(KERNELS[name]())
    for seed in range(12):
        rng = random.Random(f"{name} {seed}")
        state = random_state(rng, Scheduler(kernel, rng.choice(TARGETS)), rng.randint(0, 10))
        f = cost_of(state)
        assert math.isfinite(f.cycles) and f.cycles > 0
        assert f.accumulators >= 0 and f.scratch_bytes >= 0
        assert math.isfinite(f.flops) and f.flops >= 0 and math.isfinite(f.bytes_moved) and f.bytes_moved >= 0
        assert cost_of(state) is f, "computed once per state"


@pytest.mark.parametrize("name", a_half(KERNELS))
def test_bounds_rise_to_the_cycles(name: str) -> None:
    kernel, states = Kernel(KERNELS[name]()), dict[bytes, Scheduler]()
    for seed in range(12):
        rng = random.Random(f"{name} bounds {seed}")
        state = random_state(rng, Scheduler(kernel, TARGETS[seed % len(TARGETS)]), rng.randint(0, 10))
        bounds = list(bounds_of(state))
        assert bounds == sorted(bounds) and bounds[-1] == cost_of(state).cycles, state
        states[state.digest] = state
    found = list(states.values())
    cycles = [cost_of(s).cycles for s in found]
    for factor in (1.0, 1.1, 3.0):
        assert within(found, factor) == {k: c for k, c in enumerate(cycles) if c <= factor * min(cycles)}
    assert within([], 1.0) == {}


def test_the_search_for_the_fastest_states_prices_few_others_wholly() -> None:
    states = [apply_opts(Scheduler(Kernel(gemm(64, 128, 96)), TARGET), [Opt("UPCAST", "o0", n), Opt("UPCAST", "o1", 32)])
              for n in range(2, 33)]
    [(best, _)] = within(states, 1.0).items()
    assert best == min(range(len(states)), key=lambda k: cost_of(states[k]).cycles)
    states = [apply_opts(Scheduler(s.kernel, TARGET), s.applied_opts) for s in states]
    within(states, 1.0)
    assert sum([loop_nest.known(s) is not None for s in states]) < len(states) / 3


def test_flops_of_a_contraction_are_counted() -> None:
    kernel = Kernel(gemm(64, 128, 96))
    for chain in ([], [["UPCAST", "o0", 4]], [["UPCAST", "o0", 4], ["UPCAST", "o1", 32]], [["UPCAST", "o1", 64], ["UNROLL", "r0", 4]]):
        assert features_of(kernel, chain).flops == pytest.approx(2 * 64 * 128 * 96)


def test_accumulators_are_vector_registers() -> None:
    kernel = Kernel(gemm(64, 128, 96))
    assert features_of(kernel, [["UPCAST", "o0", 4], ["UPCAST", "o1", 32]]).accumulators == 8
    assert features_of(kernel, [["UPCAST", "o0", 4], ["UPCAST", "o1", 32], ["UNROLL", "r0", 4]]).accumulators == 8, "no more of them"
    assert features_of(kernel, [["UPCAST", "o1", 16], ["UPCAST", "r0", 3]]).accumulators == 3, "partial results"


def test_scratch_is_what_lives_there() -> None:
    """Scratch holds a panel of 96 × 32 floats per iteration of o1, and lowering reserves at least as many bytes."""
    staged = features_of(Kernel(gemm(64, 128, 96)), [["UPCAST", "o1", 32], ["STAGE", "s1", "o1"]])
    assert staged.scratch_bytes >= 96 * 32 * 4


def test_what_fits_a_cache_is_not_moved_again() -> None:
    """All data of a small contraction fit in the L2 cache, also on a machine without L3."""
    assert TARGET.l3 == 0
    assert features_of(Kernel(gemm(64, 128, 96)), []).bytes_moved == 0
    assert features_of(Kernel(lines(1 << 22)), [["UPCAST", "o0", 16]]).bytes_moved == pytest.approx(3 * (4 << 22), rel=0.1), \
        "read; fetched and written back"


def test_register_tiles_are_predicted_to_pay() -> None:
    kernel = Kernel(gemm(256, 256, 256))
    plain, vectors = features_of(kernel, []), features_of(kernel, [["UPCAST", "o1", 32]])
    tiled: list[list[Any]] = [["UPCAST", "o0", 8], ["UPCAST", "o1", 32]]
    tile = features_of(kernel, tiled)
    assert tile.cycles < vectors.cycles < plain.cycles
    assert loads_per_multiply_add(kernel, tiled) < loads_per_multiply_add(kernel, [["UPCAST", "o1", 32]])


def test_cores_and_vectors_are_predicted_to_pay() -> None:
    kernel = Kernel(lines(1 << 20))
    one, wide = features_of(kernel, []), features_of(kernel, [["UPCAST", "o0", 16]])
    assert wide.cycles < one.cycles
    assert features_of(kernel, [["UPCAST", "o0", 16], ["THREAD", "o0", 4]]).cycles < wide.cycles


def test_more_work_costs_more() -> None:
    cycles = [features_of(Kernel(softmax(n, 256)), [["UPCAST", "s1.r0", 16]]).cycles for n in (8, 64, 512)]
    assert cycles[1] == pytest.approx(8 * cycles[0], rel=0.2) and cycles[2] == pytest.approx(8 * cycles[1], rel=0.2)


def test_short_sums_overlap_and_long_ones_wait() -> None:
    """A second accumulator halves the predicted time of long sums, but not of short ones, which overlap within a core's out-of-order
    window."""
    gains = []
    for k in (4, 256):
        kernel = Kernel(kernel_of(data(64, k) @ data(k, 16)))
        one, two = (features_of(kernel, [["UPCAST", "o1", 16], ["UNROLL", "r0", 4], *more]) for more in ([], [["UPCAST", "o0", 2]]))
        gains.append(one.cycles / two.cycles)
    assert gains[0] < 1.5 < gains[1]


@pytest.mark.parametrize(("channels", "gain"), [(96, 1.0), (8, 1.05)])
def test_copies_share_the_caches_and_save_masks(channels: int, gain: float) -> None:
    """A depthwise window gains from a padded copy, which needs no masks, only if the caches hold the input: otherwise the time of memory
    hides that of computing masks."""
    kernel = Kernel(kernel_of(data(1, channels, 112, 112).conv2d(data(channels, 1, 3, 3), padding=1, groups=channels)))
    tile: list[list[Any]] = [["UPCAST", "o1", 4], ["UPCAST", "o2", 16], ["UNROLL", "r0", 0], ["UNROLL", "r1", 0], ["LANES", "o2.in"]]
    in_place, copied = features_of(kernel, tile), features_of(kernel, [*tile, ["STAGE", "s0", "o1"]])
    assert in_place.bytes_moved == pytest.approx(copied.bytes_moved, rel=0.05), "the copy finds no more of the input in the caches"
    assert in_place.cycles / copied.cycles == pytest.approx(gain, abs=0.02)


def test_lanes_apart_under_a_mask_cost_more_than_a_copy() -> None:
    """For loads of every second element under a mask that varies, a copy pays: it removes the masks, once for all overlapping windows."""
    kernel = Kernel(kernel_of(data(1, 64, 83, 83).max_pool2d(3, stride=2, padding=1)))
    tile: list[list[Any]] = [["UPCAST", "o1", 2], ["UPCAST", "o2", 16], ["UNROLL", "r0", 0], ["UNROLL", "r1", 0], ["LANES", "o2.in"]]
    assert features_of(kernel, [*tile, ["STAGE", "s0", "o1"]]).cycles < features_of(kernel, tile).cycles


def test_masks_that_no_loop_changes_are_constants() -> None:
    """If a vector covers a whole row of windows, the mask is a compile-time constant and a copy without masks gains nothing. With a loop
    over the window's columns the mask varies, and the copy gains."""
    kernel = Kernel(kernel_of(data(1, 64, 83, 83).max_pool2d(3, stride=2, padding=1)))
    whole: list[list[Any]] = [["UPCAST", "o1", 2], ["UPCAST", "o2", 42], ["UNROLL", "r0", 0], ["LANES", "o2.in"]]
    for tile, pays in (([*whole, ["UNROLL", "r1", 0]], False), (whole, True)):
        assert (features_of(kernel, [*tile, ["STAGE", "s0", "o1"]]).cycles < features_of(kernel, tile).cycles) is pays


def test_sums_that_are_turned_to_be_stored_need_registers_for_it() -> None:
    """27 accumulators, 3 vectors and a broadcast value fill 32 registers. If lanes are rows of the output, the transposition before the
    store needs more."""
    kernel = Kernel(gemm(480, 480, 256))
    along = features_of(kernel, [["UPCAST", "o0", 9], ["UPCAST", "o1", 48], ["LANES", "o1.in"]])
    turned = [features_of(kernel, [["UPCAST", "o1", m], ["UPCAST", "o0", 48], ["LANES", "o0.in"], ["STAGE", "s0", "o0"]]) for m in (8, 9)]
    assert along.accumulators == turned[1].accumulators == 27
    assert turned[0].cycles < turned[1].cycles


@pytest.mark.parametrize(("rows", "lanes", "is_spilled"), [
    (14, 32, False), (14, 28, False), (14, 24, True), (10, 20, True), (9, 24, False), (8, 40, True), (7, 40, False)])
def test_sums_in_narrow_vectors_take_second_registers_in_unrolled_loops(rows: int, lanes: int, is_spilled: bool) -> None:
    """14 rows of 24 lanes are 28 sums, half of them of 8 lanes, and fit 32 registers only in a loop that is not unrolled: unrolled by two,
    a product of 1744 × 155 × 24 took 101 us instead of 37 (AVX-512)."""
    kernel = Kernel(gemm(1744, lanes, 156))
    tile: list[list[Any]] = [["UPCAST", "o0", rows], ["UPCAST", "o1", lanes], ["LANES", "o1.in"], ["STAGE", "s1", "root"]]
    once, unrolled = features_of(kernel, tile), features_of(kernel, [*tile, ["UNROLL", "r0", 2]])
    assert (unrolled.cycles > once.cycles) == is_spilled


def test_rows_of_the_output_that_share_cache_sets_are_dear_to_store() -> None:
    """If lanes are rows of the output, each row is stored with its neighbouring columns. Rows a page apart map to the same cache sets and
    evict each other."""
    def cycles(n: int, chain: list[list[Any]]) -> float:
        state = apply_opts(Scheduler(Kernel(gemm(960, n, 64)), TARGET), [Opt.from_json(o) for o in chain])
        return IssuePricer(work_of(state)[0], CPU).price().cycles / n

    turned: list[list[Any]] = [["UPCAST", "o1", 12], ["UPCAST", "o0", 32], ["LANES", "o0.in"], ["STAGE", "s0", "o0"]]
    along: list[list[Any]] = [["UPCAST", "o0", 12], ["UPCAST", "o1", 32], ["LANES", "o1.in"], ["ORDER", "out", ["o1", "o0"]]]
    assert cycles(12 * 512, turned) > 1.2 * cycles(12 * 500, turned)
    assert cycles(12 * 512, along) == pytest.approx(cycles(12 * 480, along), rel=0.01)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(48, 96, 96), (64, 10, 384), (256, 1, 2048)])
def test_partial_results_pass_between_caches(rows: int, columns: int, depth: int) -> None:
    """Splitting a sum costs more to start than sharing the rows: one core fetches the other's part from its cache."""
    base = Scheduler(Kernel(gemm(rows, columns, depth)), replace(TARGET, threads=2))
    tiled = [Opt("UPCAST", "o0", 8), Opt("UNROLL", "r0", 2)]
    shared, split = (cost_of(apply_opts(base, [*tiled, Opt("THREAD", axis, 2)])) for axis in ("o0", "r0"))
    launched = [sum(dict(part.terms)["launch"] for part in cost.parts) for cost in (shared, split)]
    assert launched[1] > launched[0] + 0.99 * CPU.combined_line_cycles * rows * columns * 4 / 64 / 2


# cycles of a Zen 4 for a vector of 16 elements, loads and stores included; the elements are in the first cache
CYCLES_OF_FUNCTIONS = {"exp": 9.7, "exp2": 9.5, "log": 21.2, "log2": 20.9, "sin": 25.7, "cos": 26.4, "tanh": 13.9, "erf": 16.5, "sqrt": 9.9}
# cycles of a Zen 4 for the sum of a row of so many elements in vectors
CYCLES_OF_ROWS = {10: 5.2, 16: 5.0, 48: 8.8, 64: 10.6}


@pytest.mark.parametrize("name", CYCLES_OF_FUNCTIONS)
def test_functions_cost_what_their_polynomials_take(name: str) -> None:
    kernel = Kernel(kernel_of(getattr(data(4096), name)()))
    cost = cost_of(apply_opts(Scheduler(kernel, replace(AVX512, threads=1)), [Opt("UPCAST", "o0", 64)]))
    assert cost.cycles / 256 == pytest.approx(CYCLES_OF_FUNCTIONS[name], rel=0.12)


@pytest.mark.parametrize("columns", CYCLES_OF_ROWS)
def test_lanes_are_combined_at_the_end_of_a_row(columns: int) -> None:
    kernel = Kernel(kernel_of(data(128, columns).sum(1)))
    cost = cost_of(apply_opts(Scheduler(kernel, replace(AVX512, threads=1)), [Opt("UPCAST", "r0", columns)]))
    assert cost.cycles / 128 == pytest.approx(CYCLES_OF_ROWS[columns], rel=0.3)
