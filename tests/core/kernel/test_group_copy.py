"""Copies of groups into shared memory: order of threads, vectors, and padding of rows against bank conflicts."""
from __future__ import annotations

import operator
import random
from dataclasses import replace

import pytest

from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.group_memory.banks import SharedAccess, conflicts, with_row_pad
from svod.core.kernel.group_memory.copy import along_vector, group_copy
from svod.core.kernel.kernel import Kernel, ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.loop_nest import StageNest, loop_nest
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.levels import MemorySpace
from tests.draws import a_half, count
from tests.hand_kernels import Ast, gemm, number
from tests.toy_backend.target import TOY

GPU = replace(TOY, group_threads=1024, shared_bytes=48 << 10, subgroup=32)
TILED = [["UPCAST", "o0", 4], ["UPCAST", "o1", 4], ["LOCAL", "o0", 16], ["LOCAL", "o1", 16], ["TILE", "r0", 16], ["STAGE", "s0", "r0"],
         ["STAGE", "s1", "r0"]]


def stages(m: int, n: int, k: int) -> tuple[StageNest, StageNest]:
    state = apply_opts(Scheduler(Kernel(gemm(m, n, k)), GPU), [Opt.from_json(o) for o in TILED])
    nest = loop_nest(state)
    return nest.stages[0], nest.stages[1]


def test_the_tiled_product() -> None:
    a, b = stages(128, 256, 64)
    assert a.space is b.space is MemorySpace.SHARED
    assert a.region == (64, 16) and b.region == (16, 64)
    assert a.copy == ((0, 1), 1, 4) and b.copy == ((0, 1), 1, 4), "both are read along their rows, four at a time"
    assert a.layout is not None and b.layout is not None
    assert a.layout.order == (1, 0), "the left operand lies with the rows of the tile side by side"
    assert a.layout.row_pad > 0, "its columns are stored 64 apart: without padding all threads of a column meet in one bank"
    assert b.layout.row_pad == 0


@pytest.mark.parametrize(("n", "k", "widths"), [
    (256, 64, (4, 4)), (254, 64, (4, 2)), (253, 64, (4, 1)), (256, 62, (2, 4)), (256, 61, (1, 4))])
def test_vectors_are_as_wide_as_rows_are_aligned(n: int, k: int, widths: tuple[int, int]) -> None:
    found = stages(128, n, k)
    assert tuple(s.copy.width for s in found if s.copy is not None) == widths


@pytest.mark.parametrize(("elements", "width", "times"), [
    (range(32), 1, 1), ([0] * 32, 1, 1), (range(0, 64, 2), 1, 2), (range(0, 32 * 32, 32), 1, 32), (range(0, 32 * 33, 33), 1, 1),
    (range(0, 128, 4), 4, 4), (range(0, 32 * 64, 64), 4, 32), (range(0, 64, 2), 2, 2)])
def test_conflicts(elements: range | list[int], width: int, times: int) -> None:
    """Bank conflicts of accesses of 16 bytes per thread are counted over eight threads at a time."""
    assert conflicts(SharedAccess(tuple(elements), width, 1.0), 4) == times


def test_padded_rows_keep_their_order() -> None:
    padded = with_row_pad(Layout((3, 8, 16), (128, 16, 1), (0, 1, 2), -1, 1, 0, 384), 4)
    assert padded.strides == (160, 20, 1) and padded.size == 480 and padded.row_pad == 4


def random_index(rng: random.Random, axes: list[UOp], depth: int) -> UOp:
    """Make a random index of axes, with divisions and remainders by constants."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([*axes, axes[-1], number(rng.choice((2, 3, 8, 32)))])
    first = random_index(rng, axes, depth - 1)
    op = rng.choice((Ops.ADD, Ops.SUB, Ops.MUL, Ops.IDIV, Ops.MOD, Ops.MOD, Ops.IDIV))
    other = random_index(rng, axes, depth - 1) if op in (Ops.ADD, Ops.SUB) else number(rng.choice((2, 3, 4, 6, 8, 16, 64)))
    return first.alu(op, other)


OPERATIONS = {"ADD": operator.add, "SUB": operator.sub, "MUL": operator.mul, "IDIV": operator.floordiv, "MOD": operator.mod,
              "CMPLT": operator.lt, "CMPLE": operator.le, "AND": operator.and_}


def values_at(r: ResolvedStage, at: tuple[int, ...]) -> dict[int, int]:
    """Compute the integers and conditions of a stage at a position, by node."""
    found: dict[int, int] = {}
    for i, n in enumerate(r.nodes):
        if n.kind == "axis":
            found[i] = at[n.arg]
        elif n.kind == "const" and not n.dtype.is_float:
            found[i] = int(n.arg)
        elif n.kind == "alu" and all(s in found for s in n.src):
            found[i] = OPERATIONS[n.op](*[found[s] for s in n.src])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4, 8])
def test_what_moves_evenly_in_vectors(width: int) -> None:
    """If the analysis says that an index moves evenly, it does so at every position where a vector begins; and it says so for many indices
    with divisions."""
    rng, divided = random.Random(width), 0
    for _ in range(count(100)):
        a = Ast()
        out, x = a.param(0, 24 * 64), a.param(1, 1 << 20)
        i, j = a.axes(24, 64)
        index = random_index(rng, [i, j], 3)
        state = Scheduler(Kernel(a.sink(a.store(out, i * 64 + j, a.load(x, index + j), i, j))), GPU)
        r = place_stages(state).stage(0)
        for n, along in along_vector(r, 1, width).items():
            divided += along.step == 0 and 1 in r.nodes[n].deps
            for row in (0, 5, 23):
                for start in range(0, 64, width):
                    first = values_at(r, (row, start)).get(n)
                    if first is None:
                        continue
                    assert first % along.multiple == 0 if along.multiple else first == 0
                    assert all(values_at(r, (row, start + k))[n] == first + k * along.step for k in range(width))
    assert divided > 10


@pytest.mark.parametrize("width", a_half([2, 4]))
def test_vectors_of_copies_lie_beside_each_other_under_one_condition(width: int) -> None:
    """For any divisions in the index and any condition of the read, the elements of a vector are contiguous from a multiple of its width
    on, and all of them are read or none."""
    rng, seen = random.Random(width), [0, 0]
    for _ in range(count(300)):
        a = Ast()
        out, x = a.param(0, 24 * 64), a.param(1, 1 << 20)
        i, j = a.axes(24, 64)
        base = rng.choice((j, j % rng.choice((8, 12, 16)), j // 8 * 16 + j % 8, j + rng.choice((4, 8, 3))))
        index = base + random_index(rng, [i, j], 2) * rng.choice((1, 4, 8, 64))
        gate = None if rng.random() < 0.4 else random_index(rng, [i, j], 2) < rng.choice((3, 8, 12, 16))
        state = Scheduler(Kernel(a.sink(a.store(out, i * 64 + j, a.load(x, index, gate), i, j))), GPU)
        r = place_stages(state).stage(0)
        copy = group_copy(r, (24, 64), (({}, 0), ({}, 0)), (24, 64), (0, 1), width, {})
        if copy.vector != 1:
            continue
        for load in (n for n in r.nodes if n.kind == "load" and n.linear is not None):
            seen[load.gate >= 0] += bool(load.linear.atoms)
            for row in (0, 5, 23):
                for start in range(0, 64, copy.width):
                    at = [values_at(r, (row, start + k)) for k in range(copy.width)]
                    flat = [load.linear.const + sum(c * (row, start + k)[d] for d, c in load.linear.coefs)
                            + sum(c * values[n] for n, c in load.linear.atoms) for k, values in enumerate(at)]
                    assert flat == list(range(flat[0], flat[0] + copy.width)) and flat[0] % copy.width == 0
                    assert load.gate < 0 or len({values[load.gate] for values in at}) == 1
    assert min(seen) > 5, seen
