"""Rangeify and the two passes over ranges: the structure of the resulting kernels."""
from __future__ import annotations

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.graph.shapes import shape_of, size_of
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.axes import merge_ranges, range_lists, split_ranges
from svod.core.schedule.rangeify import StoreOutput, flatten, rangeify, reshape_coords
from svod.core.schedule.schedule import kernel_ast
from svod.core.spec.evaluate import evaluate
from tests.core.corpus import CORPUS
from tests.graph_reference import evaluate_graph

f32 = dtypes.float32


def leaf(*shape: int) -> UOp:
    return graph.reshape(graph.buffer(f32, int(np.prod(shape))), shape)


def ast_of(value: UOp) -> UOp:
    target = graph.reshape(graph.buffer(f32, size_of(value)), shape_of(value))
    return kernel_ast(value, target)[0]


def extents(u: UOp) -> tuple[int, ...]:
    return tuple(sy.extent_of(r) for r in range_lists(u))


def stages(ast: UOp) -> list[tuple[int, ...]]:
    return sorted(extents(u) for u in ast.walk(Ops.STAGE))


def product(a: UOp, b: UOp) -> UOp:
    (m, k), (_, n) = shape_of(a), shape_of(b)
    left = graph.expand(graph.reshape(a, (m, 1, k)), (m, n, k))
    right = graph.expand(graph.reshape(graph.permute(b, (1, 0)), (1, n, k)), (m, n, k))
    return graph.reshape(graph.reduce_axis(graph.alu(Ops.MUL, left, right), "ADD", (2,)), (m, n))


def test_gemm_operands_are_stages() -> None:
    ast = ast_of(product(leaf(4, 5), leaf(5, 6)))
    assert stages(ast) == [(4, 5), (6, 5)]
    store, = ast.src
    assert extents(store) == (4, 6)
    assert store.src[1].op is Ops.REDUCE and extents(store.src[1]) == (5,)


def test_conv_stages_the_padded_image() -> None:
    x = graph.pad(leaf(1, 3, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = graph.permute(graph.window(x, [(2, 3, 1, 1), (3, 3, 1, 1)]), (0, 2, 3, 1, 4, 5))
    wide = (1, 8, 8, 4, 3, 3, 3)
    image = graph.expand(graph.reshape(windows, (1, 8, 8, 1, 3, 3, 3)), wide)
    weights = graph.broadcast(leaf(4, 3, 3, 3), wide)
    y = graph.reduce_axis(graph.alu(Ops.MUL, image, weights), "ADD", (4, 5, 6))
    assert stages(ast_of(y)) == [(3, 10, 10), (4, 3, 3, 3)]


def test_a_value_read_at_two_places_is_a_stage() -> None:
    x = graph.alu(Ops.EXP, leaf(5, 5))
    assert stages(ast_of(graph.alu(Ops.ADD, x, graph.permute(x, (1, 0))))) == [(5, 5)]
    assert stages(ast_of(graph.alu(Ops.ADD, x, x))) == []


def test_elementwise_work_below_a_broadcast_is_one_stage() -> None:
    x = graph.alu(Ops.EXP, leaf(4, 5))
    ast = ast_of(product(x, leaf(5, 6)))
    assert stages(ast) == [(4, 5), (6, 5)]
    assert [u.src[0].op for u in ast.walk(Ops.STAGE)].count(Ops.EXP) == 1


def test_reductions_over_the_same_ranges_share_a_loop() -> None:
    x = leaf(6, 7)
    both = graph.alu(Ops.SUB, graph.reduce_axis(x, "MAX", (1,)), graph.reduce_axis(x, "MIN", (1,)))
    ast = ast_of(both)
    assert stages(ast) == [(6, 7)]
    assert len({range_lists(r) for r in ast.walk(Ops.REDUCE)}) == 1


def test_contiguous_work_has_one_range() -> None:
    ast = ast_of(graph.alu(Ops.ADD, leaf(2, 3, 4), leaf(2, 3, 4)))
    assert extents(ast.src[0]) == (24,)


def test_heads_are_split_without_division() -> None:
    x = graph.permute(graph.reshape(leaf(6, 8), (6, 2, 4)), (1, 0, 2))
    flat = graph.reshape(x, (12, 4))
    ast = ast_of(graph.alu(Ops.EXP, flat))
    assert extents(ast.src[0]) == (2, 6, 4)
    assert not any(u.dtype == dtypes.index for u in ast.walk(Ops.IDIV, Ops.MOD))


def test_pads_become_one_gate() -> None:
    x = graph.pad(graph.pad(leaf(5), [(1, 0)]), [(1, 2)])
    ast = ast_of(x)
    load, = ast.walk(Ops.LOAD)
    assert len(load.src) == 3 and {u.op for u in load.src[2].src} <= {Ops.CMPLE, Ops.CMPLT}
    assert not list(ast.walk(Ops.WHERE))
    assert len(next(ast_of(graph.shrink(x, [(2, 6)])).walk(Ops.LOAD)).src) == 1


@pytest.mark.parametrize(("shape", "gated"), [((1, 1), False), ((3, 1), False), ((1, 5), True), ((3, 5), True)])
def test_only_loads_that_a_pad_moves_outside_have_a_gate(shape: tuple[int, int], gated: bool) -> None:
    """Columns are padded: a factor for each row is read at the same place inside and outside, and its value outside is not used."""
    x, factor = leaf(3, 5), leaf(*shape)
    y = graph.alu(Ops.MUL, x, graph.expand(factor, (3, 5)))
    ast = ast_of(graph.pad(y, [(0, 0), (2, 1)]))
    has_gate = {load.src[0].src[0].arg.size: len(load.src) == 3 for load in ast.walk(Ops.LOAD)}
    assert has_gate[15] and has_gate[int(np.prod(shape))] == gated
    where, = ast.walk(Ops.WHERE)
    assert where is ast.src[0].src[1]


def test_a_mask_over_iotas_is_a_gate() -> None:
    rows, columns = (graph.broadcast(graph.reshape(graph.iota(4), s), (4, 4)) for s in ((4, 1), (1, 4)))
    mask = graph.alu(Ops.CMPLE, columns, rows)
    ast = ast_of(graph.alu(Ops.WHERE, mask, leaf(4, 4), graph.full((4, 4), 0, f32)))
    condition = ast.src[0].src[1].src[0]
    assert condition.op is Ops.CMPLE and all(s.dtype == dtypes.index for s in condition.src)


def test_a_gather_index_bounds_its_param() -> None:
    index = graph.buffer(dtypes.int64, 3)
    value = graph.gather(leaf(7, 2), index, 0)
    ast, buffers = rangeify([StoreOutput(value, graph.reshape(graph.buffer(f32, 6), (3, 2)))])
    param = next(p for p in ast.walk(Ops.PARAM) if p.dtype == dtypes.int64)
    assert (param.arg.vmin, param.arg.vmax) == (0, 6) and buffers[param.arg.slot] is index


def test_looked_up_positions_need_no_division() -> None:
    """A position inside of an axis says which block of a merged axis an element is of, as far as the gate lets it be read."""
    blocks = graph.reshape(graph.broadcast(graph.reshape(leaf(3), (3, 1)), (3, 2 * 4 * 5)), (6, 4, 5))
    value = graph.gather(graph.gather(blocks, graph.buffer(dtypes.int64, 7), 2), graph.buffer(dtypes.int32, 9), 1)
    assert not any(u.dtype == dtypes.index for u in ast_of(value).walk(Ops.IDIV, Ops.MOD))


def test_a_sum_over_what_does_not_vary() -> None:
    x = graph.expand(graph.reshape(leaf(4), (4, 1)), (4, 9))
    ast = ast_of(graph.reduce_axis(x, "ADD", (1,)))
    assert not list(ast.walk(Ops.REDUCE))
    assert not list(ast_of(graph.reduce_axis(x, "MAX", (1,))).walk(Ops.REDUCE))


@pytest.mark.parametrize("name", CORPUS)
def test_models_need_no_division(name: str) -> None:
    assert not any(u.dtype == dtypes.index for u in CORPUS[name]().walk(Ops.IDIV, Ops.MOD))


def random_shape(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    shape = []
    while n > 1:
        d = int(rng.choice([d for d in range(2, n + 1) if n % d == 0]))
        shape.append(d)
        n //= d
    for _ in range(rng.integers(0, 3)):
        shape.insert(int(rng.integers(0, len(shape) + 1)), 1)
    return tuple(int(s) for s in rng.permutation(shape)) if shape else ()


@pytest.mark.parametrize("seed", range(40))
def test_reshape_coordinates_keep_the_flat_index(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 2, 12, 30, 48, 60]))
    shape, source = random_shape(rng, n), random_shape(rng, n)
    coords = tuple(sy.INDEX_ZERO if e == 1 else sy.make_range(e, i) for i, e in enumerate(shape))
    moved = reshape_coords(coords, shape, source)
    assert len(moved) == len(source)
    assert all(sy.vmin(c) >= 0 and sy.vmax(c) < e for c, e in zip(moved, source, strict=True))
    assert flatten(moved, source) is flatten(coords, shape)


def test_passes_before_and_after() -> None:
    """The examples of svod/core/schedule/axes.py."""
    y, x = (UOp(Ops.PARAM, f32, (), Param(slot, size)) for slot, size in enumerate((12, 24)))
    i = sy.make_range(12, 0)
    where = sy.add(sy.scale(sy.floordiv(i, 4), 8), sy.floormod(i, 4))
    store = UOp(Ops.STORE, dtypes.void, (UOp(Ops.INDEX, f32, (y, i)), UOp(Ops.LOAD, f32, (UOp(Ops.INDEX, f32, (x, where)),)), i))
    ast = split_ranges(UOp(Ops.SINK, dtypes.void, (store,)))
    assert extents(ast.src[0]) == (3, 4)
    assert merge_ranges(ast) is ast
    data = np.arange(24, dtype=np.float32)
    np.testing.assert_array_equal(evaluate(ast, [np.zeros(12, np.float32), data])[0], data.reshape(3, 8)[:, :4].ravel())


def test_merged_stages_read_a_part_by_its_own_strides() -> None:
    """A stage that is read whole by one stage and in part by another must not merge its ranges."""
    x = leaf(4, 5)
    e = graph.alu(Ops.EXP, x)
    part = graph.shrink(e, [(0, 4), (0, 3)])
    y = graph.alu(Ops.ADD, graph.reduce_axis(e, "ADD", (0, 1)), graph.reduce_axis(part, "MAX", (0, 1)))
    b = x.src[0]
    content = np.random.default_rng(0).standard_normal(20).astype(np.float32)
    ast, buffers, *_ = kernel_ast(y, graph.reshape(graph.buffer(f32, 1), (1, 1)))
    got = evaluate(ast, [content if a is b else np.zeros(1, np.float32) for a in buffers])[0]
    np.testing.assert_allclose(got, evaluate_graph(y, {b: content}).ravel(), rtol=1e-6)
