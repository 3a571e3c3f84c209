"""States as values: names, identity, replay, mutation."""
from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from svod.core.cost.cost import tiling_family
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import LOOP, Opt, Scheduler
from svod.errors import KernelOptError
from tests.chains import random_state
from tests.compile.native import AVX512, BASELINE
from tests.hand_kernels import HAND, gemm

TARGET = replace(AVX512, threads=4)
GEMM = Kernel(gemm(24, 48, 30))
NAMES = ("hand_gemm", "hand_softmax", "padded_window", "in_place_accumulate", "argmax_rows", "constants_only", "hand_dot")


def apply(chain: list[list[Any]], kernel: Kernel = GEMM) -> Scheduler:
    return apply_opts(Scheduler(kernel, TARGET), [Opt.from_json(o) for o in chain])


# -- opts as data -----------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [["UPCAST", "o0", 8], ["ORDER", "out", ["o1", "o0"]], ["STREAM", "out", None], ["STAGE", "s0", "root"],
                                  ["PREFETCH", "p1", 8]])
def test_opts_are_json(data: list[Any]) -> None:
    assert Opt.from_json(data).to_json() == data
    assert hash(Opt.from_json(data)) == hash(Opt.from_json(data))


def test_the_argument_may_be_left_out() -> None:
    assert Opt.from_json(["STREAM", "out"]) == Opt("STREAM", "out")
    assert str(Opt("STREAM", "out")) == "STREAM(out)" and str(Opt("ORDER", "out", ("o1", "o0"))) == "ORDER(out, o1,o0)"


@pytest.mark.parametrize("data", [None, [], ["UPCAST"], ["UPCAST", 3], [3, "o0"], "UPCAST", {"op": "UPCAST"}, ["UPCAST", "o0", 2, 3]])
def test_other_data_is_refused(data: Any) -> None:
    with pytest.raises(KernelOptError, match="an opt is"):
        Opt.from_json(data)


# -- the table ----------------------------------------------------------------------------------------
def test_rows_keep_their_names_and_places() -> None:
    state = apply([["TILE", "o0", 8], ["UPCAST", "o0", 3], ["TILE", "o0.in", 4]])
    assert [r.name for r in state.rows[:len(GEMM.axes)]] == [a.name for a in GEMM.axes]
    assert [r.name for r in state.rows[len(GEMM.axes):]] == ["o0.in", "o0.in2", "o0.in.in"]
    assert state.rows[state.row_id("o0")].extent == 1, "used up: 24 / 8 / 3"
    assert state.row_id("o0") not in state.order[GEMM.output]


def test_a_state_is_a_value() -> None:
    start = Scheduler(GEMM, TARGET)
    before = (start.rows, start.order, start.place, start.digest)
    apply_opt(start, Opt("UPCAST", "o0", 4))
    assert (start.rows, start.order, start.place, start.digest) == before and start.applied_opts == ()


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(KernelOptError, match=r"no axis 'k'.*o0, o1, r0"):
        Scheduler(GEMM, TARGET).row_id("k")
    with pytest.raises(KernelOptError, match=r"no stage 's7'.*s0, s1, out"):
        Scheduler(GEMM, TARGET).stage_id("s7")


@pytest.mark.parametrize("name", NAMES)
def test_rows_cover_their_axis(name: str) -> None:
    """After any chain the parts of an axis have nested strides whose positions cover its extent, and every loop has more than one
    iteration."""
    kernel = Kernel(HAND[name]())
    for seed in range(20):
        state = random_state(random.Random(f"{name} {seed}"), Scheduler(kernel, TARGET), 8)
        for axis, ids in zip(kernel.axes, state.axis_rows, strict=True):
            stride = 1
            for row in reversed([state.rows[i] for i in ids]):
                assert row.axis == axis.index and row.stride == stride
                stride *= row.extent
            assert stride >= state.axis_extent(axis.index) >= axis.extent
        for stage in kernel.stages:
            own = [i for a in stage.outs + stage.reds for i in state.axis_rows[a]]
            loops = [i for i in own if state.rows[i].role == LOOP and state.rows[i].extent > 1]
            assert sorted(state.order[stage.index]) == sorted(loops)


@pytest.mark.parametrize("name", [*NAMES, "variance_again"])
def test_a_plan_is_the_states_own(name: str) -> None:
    """The placement of stages that an opt updates incrementally equals a placement of all stages from scratch."""
    taken_over = 0
    for seed in range(20):
        rng, state = random.Random(f"{name} {seed}"), Scheduler(Kernel(HAND[name]()), TARGET)
        for length in range(1, 9):
            placed = place_stages(state)
            state = random_state(rng, state, length)
            taken_over += place_stages(state) is placed and len(state.applied_opts) == length
            assert place_stages(state) == place_stages(state.copy()), [str(o) for o in state.applied_opts]
    assert taken_over


# -- identity -----------------------------------------------------------------------------------------
def test_identity_is_the_table_not_the_text() -> None:
    one, other = apply([["UPCAST", "o0", 4], ["UPCAST", "o1", 16]]), apply([["UPCAST", "o1", 16], ["UPCAST", "o0", 4]])
    assert one.digest == other.digest and one.applied_opts != other.applied_opts
    assert apply([["TILE", "o0", 8], ["UPCAST", "o0.in", 4]]).digest != one.digest


DIFFERENT: list[list[list[Any]]] = [
    [], [["UPCAST", "o0", 4]], [["UPCAST", "o0", 8]], [["UPCAST", "o1", 4]], [["UPCAST", "r0", 5]], [["UNROLL", "r0", 5]],
    [["TILE", "r0", 5]], [["TILE", "o0", 4]], [["SWAP", "o0", "o1"]], [["SWAP", "o0", "r0"]],
    [["PADTO", "o0", 5]], [["THREAD", "o0", 2]], [["THREAD", "o0", 3]],
    [["THREAD", "r0", 2]], [["STREAM", "out"]], [["STAGE", "s0", "o0"]], [["STAGE", "s0", "r0"]],
    [["STAGE", "s0", "root"]], [["STAGE", "s1", "root"]],
    [["PREFETCH", "p1", 4]], [["PREFETCH", "p1", 8]], [["PREFETCH", "p2", 4]],
    [["UPCAST", "o0", 4], ["UPCAST", "o1", 16], ["LANES", "o0.in"]], [["UPCAST", "o0", 4], ["UPCAST", "o1", 16], ["LANES", "o1.in"]],
    [["TILE", "o0", 8], ["STAGE", "s0", "o0"]], [["TILE", "o0", 8], ["STAGE", "s0", "o0.in"]],
    [["TILE", "o0", 4], ["UPCAST", "o0", 2]], [["UPCAST", "o0", 2], ["TILE", "o0", 4]], [["UPCAST", "o0", 8]],
]


def test_everything_that_changes_code_changes_the_identity() -> None:
    digests = [apply(c).digest for c in DIFFERENT[:-1]]
    assert len(set(digests)) == len(digests)
    assert apply(DIFFERENT[-1]).digest in digests


def test_the_identity_does_not_depend_on_the_process() -> None:
    """The identity equals a recorded value, so workers and driver agree on it."""
    assert apply([["UPCAST", "o0", 4], ["STAGE", "s1", "o1"], ["THREAD", "o0", 2]]).digest.hex() == "2637f94fb29e74d2dae8ef01dde9fec8"


# -- replay and mutation ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_replays(name: str) -> None:
    kernel = Kernel(HAND[name]())
    for seed in range(10):
        start = Scheduler(kernel, TARGET)
        state = random_state(random.Random(f"{name} {seed}"), start, 8)
        again = apply_opts(start, [Opt.from_json(o.to_json()) for o in state.applied_opts])
        assert again.digest == state.digest and again.rows == state.rows and again.applied_opts == state.applied_opts


@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_opt_touches_its_axis_or_raises(name: str) -> None:
    """If one amount of a chain changes, only the axis that the opt names, and the axes split off it, change."""
    kernel = Kernel(HAND[name]())
    mutated = 0
    for seed in range(30):
        rng = random.Random(f"{name} {seed}")
        start = Scheduler(kernel, TARGET)
        state = random_state(rng, start, 6)
        chain = list(state.applied_opts)
        amounts = [i for i, o in enumerate(chain) if o.op in ("UPCAST", "UNROLL", "TILE", "PADTO")]
        if not amounts:
            continue
        at = rng.choice(amounts)
        chain[at] = chain[at]._replace(arg=rng.choice([2, 3, 4, 8, 16, 10 ** 6]))
        axis = state.rows[state.row_id(chain[at].axis)].axis
        try:
            other = apply_opts(start, chain)
        except KernelOptError:
            continue
        mutated += 1
        for i, (a, b) in enumerate(zip(state.axis_rows, other.axis_rows, strict=True)):
            if i != axis:
                assert [state.rows[r] for r in a] == [other.rows[r] for r in b]
        assert other.place == state.place and other.thread == state.thread and other.stream == state.stream
    assert mutated


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_opt_touches_the_named_axis_or_raises(name: str) -> None:
    """If the last split of a chain names another axis, no other axis changes."""
    kernel = Kernel(HAND[name]())
    for seed in range(20):
        rng = random.Random(f"{name} {seed}")
        state = random_state(rng, Scheduler(kernel, TARGET), 4)
        row = rng.choice(state.rows)
        try:
            other = apply_opt(state, Opt(rng.choice(["UPCAST", "UNROLL", "TILE"]), row.name, rng.choice([2, 3, 4])))
        except KernelOptError:
            continue
        for i, (a, b) in enumerate(zip(state.axis_rows, other.axis_rows, strict=True)):
            assert (a == b) == (i != row.axis)


# -- targets and families -----------------------------------------------------------------------------
def test_the_target_limits_registers_and_cores() -> None:
    small = Scheduler(GEMM, replace(BASELINE, threads=1))
    with pytest.raises(KernelOptError, match="cores"):
        apply_opt(small, Opt("THREAD", "o0", 2))
    tiled = apply_opt(small, Opt("UPCAST", "o0", 8))
    with pytest.raises(KernelOptError, match="16, and twice that"):
        apply_opt(tiled, Opt("UPCAST", "o1", 32))


def test_families_forget_amounts() -> None:
    four, eight = (tiling_family(apply([["UPCAST", "o0", n], ["STAGE", "s1", "o1"]])) for n in (4, 8))
    assert four == eight
    assert tiling_family(apply([["UPCAST", "o0", 4]])) != tiling_family(apply([["UPCAST", "o1", 4]]))
    assert "UPCAST(o0, 4)" in repr(apply([["UPCAST", "o0", 4]]))
