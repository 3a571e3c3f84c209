"""Non-temporal stores, which bypass the caches: lowering, the cost analysis and the sketches agree on them."""
from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import heuristic
from svod.core.graph.graph import sink
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.non_temporal import has_non_temporal_stores
from svod.core.kernel.scheduler import LOOP, Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.chains import random_opt
from tests.compile.native import AVX2, AVX512, BASELINE
from tests.hand_kernels import HAND, gemm, lines

STREAM = Opt("STREAM", "out")
SERVER = replace(AVX512, l1=48 << 10, l2=2 << 20, l3=32 << 20, threads=2)


def streamed(program: Program) -> list[list[bool]]:
    """List for each phase that stores to an argument whether each of its stores is non-temporal."""
    phases = [[bool(i[4][1]) if i[0] == "STORE" else False for i in code
               if i[0] in ("STORE", "STORES", "SCATTER") and code[i[3][0]][0] == "ARG"] for code in program.code]
    return [stores for stores in phases if stores]


@pytest.mark.parametrize(("extent", "chain", "whole"), [
    (128, [("UPCAST", "o0", 32)], True), (100, [("UPCAST", "o0", 32)], False), (96, [("UPCAST", "o0", 24)], False),
    (112, [("UPCAST", "o0", 32)], True), (128, [("PADTO", "o0", 96), ("UPCAST", "o0", 32)], False), (128, [], False),
    (9973, [("UPCAST", "o0", 64)], True), (9973, [("UPCAST", "o0", 24)], False),
    (9973, [("TILE", "o0", 64), ("UPCAST", "o0.in", 16)], False)])
def test_tiles(extent: int, chain: list[tuple[str, str, int]], whole: bool) -> None:
    """In 112 positions by tiles of 32, the last tile is moved back to 80, a multiple of the vector. For a long row the last tile has a
    separate loop."""
    state = apply_opts(Scheduler(Kernel(lines(extent)), AVX512), [Opt(*o) for o in chain])
    assert has_non_temporal_stores(state) is whole is (cost_of(apply_opt(state, STREAM)) != cost_of(state))


def test_stores_are_streamed_where_all_of_a_phase_can_be() -> None:
    """Under random chains a phase streams all of its stores or none, and some phase streams exactly if the analysis says so."""
    rng = random.Random(5)
    said = 0
    names = [*HAND, *["vectors"] * len(HAND)]
    for _ in range(250):
        name = rng.choice(names)
        kernel = Kernel(HAND[name]() if name != "vectors" else rng.choice(
            [lines(rng.randint(1, 40) * rng.choice((1, 8, 16))), gemm(rng.randint(1, 9), 16 * rng.randint(1, 5), rng.choice((1, 3)))]))
        state = Scheduler(kernel, rng.choice((BASELINE, AVX2, AVX512)))
        for _ in range(rng.randint(1, 6)):
            try:
                state = apply_opt(state, random_opt(rng, state))
            except KernelOptError:
                continue
        if math.prod(r.extent for r in state.rows if r.role != LOOP) > 200:
            continue
        state = state if state.stream else apply_opt(state, STREAM)
        try:
            phases = streamed(lower(state))
        except KernelOptError:
            continue
        assert all(all(p) or not any(p) for p in phases), state.applied_opts
        assert any(map(any, phases)) == has_non_temporal_stores(state), state.applied_opts
        said += has_non_temporal_stores(state)
    assert said > 5


@pytest.mark.parametrize(("columns", "whole"), [(4096, True), (4099, True), (1001, False), (1016, False), (1008, True)])
def test_rows_that_begin_between_vectors_gain_where_they_are_long(columns: int, whole: bool) -> None:
    """The two axes cannot be merged, as the second operand is the same for all rows. Of a long row all vectors except those at its ends are
    stored at multiples of their size."""
    out = Tensor.empty(8192, columns) + Tensor.empty(1, columns)
    state = Scheduler(Kernel(create_schedule(sink(out.uop)).calls[0].ast), SERVER)
    axis = state.kernel.axes[state.kernel.stages[state.kernel.output].outs[-1]].name
    tiled = apply_opt(state, Opt("UPCAST", axis, 16))
    past = apply_opt(tiled, STREAM)
    assert len(state.kernel.stages[state.kernel.output].outs) == 2
    assert (cost_of(past) != cost_of(tiled)) == whole == any(map(any, streamed(lower(past))))
    chosen = heuristic(state)
    assert not chosen.stream or any(map(any, streamed(lower(chosen))))
    if columns == 4096:
        assert chosen.stream


def test_rows_that_lie_side_by_side_are_one_axis() -> None:
    """The axes of contiguous rows are merged, so an elementwise kernel over them streams for every row length."""
    out = Tensor.empty(8192, 4099) + Tensor.empty(8192, 4099)
    state = heuristic(Scheduler(Kernel(create_schedule(sink(out.uop)).calls[0].ast), SERVER))
    assert [a.extent for a in state.kernel.axes] == [8192 * 4099] and state.stream and any(map(any, streamed(lower(state))))
