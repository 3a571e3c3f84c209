"""Kernels over the positions of a launch: their rewrite to RANGEs, their launch dimensions, and errors."""
from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import LaunchDims, Sizes, fit_dimensions
from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.ir.text import format_ast, parse_ast
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.calls import kernel_of_call
from svod.core.schedule.canonical import canonicalize
from svod.core.schedule.thread_indices import launch_of, over_ranges, positions_of
from svod.errors import CompileError, FormatError, LaunchError
from tests.hand_kernels import Ast, number

INDEX = dtypes.index
N = UOp(Ops.DEFINE_VAR, INDEX, (), ("v0", 0, 64))


def position(name: str, extent: int | UOp) -> UOp:
    return UOp(Ops.SPECIAL, INDEX, (extent if isinstance(extent, UOp) else number(extent),), name)


def core(most: int, least: int = 0) -> UOp:
    return UOp(Ops.DEFINE_VAR, INDEX, (), ("core_id", least, most))


def doubled(*positions: tuple[UOp, int]) -> UOp:
    """Make the kernel y = x·2 over positions with the given extents, outermost first."""
    k = Ast()
    size = math.prod(n for _, n in positions)
    at, step = number(0), size
    for node, extent in positions:
        step //= extent
        at = at + node * step
    return k.sink(k.store(k.param(0, size), at, k.load(k.param(1, size), at) * 2.0))


LAUNCHES: dict[str, tuple[UOp, Sizes]] = {
    "groups": (doubled((position("g1", 5), 5), (position("gidx0", 7), 7)), Sizes((7, 5, 1), (1, 1, 1))),
    "groups and positions in them": (doubled((position("gidx2", 3), 3), (position("l0", 4), 4), (position("lidx1", 2), 2)),
                                     Sizes((1, 1, 3), (4, 2, 1))),
    "positions without groups": (doubled((position("idx1", 5), 5), (position("i0", 7), 7)), Sizes((7, 5, 1), None)),
    "cores": (doubled((core(6), 7)), Sizes((7, 1, 1), (1, 1, 1))),
    "cores, groups and positions": (doubled((core(2), 3), (position("g1", 2), 2), (position("l0", 5), 5)), Sizes((3, 2, 1), (5, 1, 1))),
    "a size by a variable": (doubled((position("g0", UOp(Ops.ABS, INDEX, (N - 9,)) + 1), 56), (position("l2", 2), 2)),
                             Sizes((5, 1, 1), (1, 1, 2))),
    "five dimensions": (doubled(*((position(f"g{k}", e), e) for k, e in enumerate((2, 3, 5, 7, 2)))), Sizes((6, 5, 14), (1, 1, 1))),
    "positions that are RANGEs already": (Kernel(doubled((core(3), 4))).ast, Sizes((4, 1, 1), (1, 1, 1))),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launch_dimensions_follow_from_special_and_core_id(name: str) -> None:
    ast, want = LAUNCHES[name]
    assert launch_of(ast).at({"v0": 5}) == want
    ranged = over_ranges(ast)
    assert not positions_of(ranged) and launch_of(ranged).at({"v0": 5}) == want     # RANGEs say what they were


def test_a_kernel_over_ranges_is_launched_once() -> None:
    k = Ast()
    r, = k.axes(4)
    ast = k.sink(k.store(k.param(0, 4), r, k.load(k.param(1, 4), r), r))
    assert over_ranges(ast) is ast and launch_of(ast) == LaunchDims() and LaunchDims().at({}) == Sizes((1, 1, 1), (1, 1, 1))


def test_positions_become_ranges_of_the_store_with_larger_steps_outside() -> None:
    """RANGEs are ordered by their steps, the largest outermost. Kernels that differ only in the spelling of the positions' names become
    one kernel."""
    kernel = Kernel(doubled((position("l0", 3), 3), (position("gidx0", 5), 5), (position("g1", 2), 2)))
    assert [(a.name, a.extent, a.node.src[1].arg) for a in kernel.axes] == [("o0", 3, "l0"), ("o1", 5, "g0"), ("o2", 2, "g1")]
    other = doubled((position("lidx0", 3), 3), (position("g0", 5), 5), (position("global1", 2), 2))
    grouped = doubled((position("l0", 3), 3), (position("l1", 5), 5), (position("g1", 2), 2))
    assert canonicalize(other)[0] is canonicalize(kernel.ast)[0] is not canonicalize(grouped)[0]


def test_stages_get_the_positions_that_they_depend_on() -> None:
    """In y[g] = Σ_r (x[g, r] + 1)·c[r], the stage of x + 1 and the stage that reads it get a RANGE for g; the stage of c gets none."""
    k = Ast()
    g = position("g0", 5)
    a, b, c, r = k.axes(7, 7, 7, 7)
    x, y, w = k.param(1, 35), k.param(0, 5), k.param(2, 7)
    left, right = k.stage(k.load(x, g * 7 + a) + 1.0, a), k.stage(k.load(w, b), b)
    product = k.stage(k.read(left, c) * k.read(right, c), c)
    ast = over_ranges(k.sink(k.store(y, g, k.reduce("ADD", k.read(product, r), r))))
    stages = list(ast.walk(Ops.STAGE))
    assert sorted([[int(r.src[0].arg) for r in s.src[1:]] for s in stages]) == [[5, 7], [5, 7], [7]]
    assert [len(r.src) for s in stages for r in s.src[1:]] == [1] * 5       # the launch is that of the STORE
    assert len({r for s in (*stages, *ast.src) for r in s.src if r.op is Ops.RANGE}) == 6
    assert [a.extent for a in Kernel(ast).axes if a.name in ("o0", "r0")] == [5, 7]


def test_what_positions_became_is_written_and_read() -> None:
    for ast, _ in LAUNCHES.values():
        for form in (ast, over_ranges(ast)):
            assert data_to_ast(ast_to_data(form)) is form and parse_ast(format_ast(form)) is form
    data = ast_to_data(over_ranges(LAUNCHES["cores"][0]))
    for row in data["nodes"]:
        if row[0] == "RANGE":
            row[2] = []
    with pytest.raises(FormatError, match="has 0 sources, expected an extent"):
        data_to_ast(data)


def test_positions_that_every_access_sees_as_one_are_merged_where_a_kernel_is_called() -> None:
    """The positions of y[(g1*3 + g0)*4 + l0] become one RANGE of 24, which still records them. Accesses y[l0*3 + g0] and x[g0*4 + l0] need
    two RANGEs."""
    ast = doubled((position("g1", 2), 2), (position("g0", 3), 3), (position("l0", 4), 4))
    called, _, _ = kernel_of_call(ast, (), {})
    merged, = called.walk(Ops.RANGE)
    assert [m.arg for m in merged.src[1:]] == ["g1", "g0", "l0"] and launch_of(called) == launch_of(ast)
    assert data_to_ast(ast_to_data(called)) is called and parse_ast(format_ast(called)) is called
    k = Ast()
    g, part = position("g0", 3), position("l0", 4)
    turned, _, _ = kernel_of_call(k.sink(k.store(k.param(0, 12), part * 3 + g, k.load(k.param(1, 12), g * 4 + part))), (), {})
    assert len(list(turned.walk(Ops.RANGE))) == 2


def unequal(first: UOp, second: UOp) -> UOp:
    """Make a kernel with two positions in one index."""
    k = Ast()
    at = first * 8 + second
    return k.sink(k.store(k.param(0, 64), at, k.load(k.param(1, 64), at)))


def one(node: UOp) -> UOp:
    return unequal(node, number(0))


def gated(sources: Callable[[UOp, UOp], tuple[UOp, ...]]) -> UOp:
    """Make a STORE with other sources, which are computed from the STORE and a condition."""
    store, = one(position("g0", 4)).src
    return UOp(Ops.SINK, dtypes.void, (store.replace(src=sources(store, store.src[0].src[1] < 3)),))


REFUSED: dict[str, tuple[Callable[[], UOp], str]] = {
    "a name of nothing": (lambda: one(position("x0", 4)), "SPECIAL 'x0' of index with 1 extents is no position of a launch"),
    "a name without a number": (lambda: one(position("gidx", 4)), "SPECIAL 'gidx' .* is no position"),
    "a float": (lambda: one(UOp(Ops.SPECIAL, dtypes.float32, (number(4),), "g0").cast(INDEX)), "'g0' of float32 .* is no position"),
    "no extent": (lambda: one(UOp(Ops.SPECIAL, INDEX, (), "g0")), "with 0 extents is no position"),
    "two of a name": (lambda: unequal(position("g0", 4), position("gidx0", 8)), "two positions of one launch are g0"),
    "groups and no groups": (lambda: unequal(position("g0", 4), position("i1", 8)), "there are no groups and cores beside them"),
    "cores and no groups": (lambda: unequal(core(3), position("i1", 8)), "there are no groups and cores beside them"),
    "cores and the first dimension": (lambda: unequal(core(3), position("g0", 8)), "core_id and g0 of one launch are both its dimension 0"),
    "cores from one": (lambda: one(core(3, 1)), r"core_id counts cores from 0, found bounds \[1, 3\]"),
    "an extent by a position": (lambda: unequal(position("g0", 4), position("g1", position("g0", 4) + 1)),
                                "the extent of position g1 depends on"),
    "not counted": (lambda: one(position("g0", 4)).replace(src=(one(position("g0", 4)).src[0], unequal(
        position("g0", 4), position("l0", 3)).src[0])), "STORE to slot 0 does not count position l0"),
    "two indices": (lambda: gated(lambda s, gate: (s.src[0].replace(src=(*s.src[0].src, gate)), s.src[1])), "found 2 indices, and nothing"),
    "a gate": (lambda: gated(lambda s, gate: (*s.src, gate)), "found 1 indices, and CMPLT behind the value: a STORE has no gate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_positions_that_no_launch_has(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(CompileError, match=said):
        over_ranges(make())


@pytest.mark.parametrize("extent", [0, -3])
def test_a_launch_dimension_that_is_not_positive(extent: int) -> None:
    for axis in (0, 2, 3):
        with pytest.raises(LaunchError, match=f"launch dimension {axis} evaluated to non-positive value {extent}"):
            launch_of(one(position(f"g{axis}", extent))).at({})
    with pytest.raises(LaunchError, match="launch dimension 1 evaluated to non-positive value -2"):
        launch_of(one(position("l1", N - 9))).at({"v0": 7})


# -- three dimensions within limits ---------------------------------------------------------------------------------------
def test_dimensions_are_folded_and_split_to_fit() -> None:
    """For random extents and limits, the result has the same number of positions and fits; an error occurs only if no factorisation
    fits."""
    rng = random.Random(5)
    refused = 0
    for _ in range(400):
        extents = [rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 13)) for _ in range(rng.randint(1, 5))]
        limits = tuple(rng.choice((2, 3, 6, 16, 40)) for _ in range(3))
        total = math.prod(extents)
        possible = any(total % x == 0 and total // x % y == 0 and total // x // y <= limits[2]
                       for x in range(1, limits[0] + 1) for y in range(1, limits[1] + 1) if x * y <= total)
        try:
            found = [int(LaunchDims(fit_dimensions([number(e) for e in extents], extents, limits)).at({}).global_size[k]) for k in range(3)]
        except LaunchError as error:
            assert not possible and str(error).startswith("cannot limit dim"), (extents, limits)
            refused += 1
            continue
        assert possible and math.prod(found) == total and all(f <= limit for f, limit in zip(found, limits, strict=True))
        if len(extents) <= 3 and all(e <= limit for e, limit in zip(extents, limits, strict=False)):
            assert found[:len(extents)] == extents      # extents within the limits stay
    assert 20 < refused < 380


def test_an_extent_by_a_variable_is_folded_and_never_split() -> None:
    limits = (1000, 65535, 30)
    folded = fit_dimensions([N, number(3), number(5), number(7)], [64, 3, 5, 7], limits)
    assert LaunchDims(folded).at({"v0": 2}).global_size == (2, 15, 7)
    for extents, most in (([N * 100], [6400]), ([N], [None])):
        with pytest.raises(LaunchError, match=r"cannot limit dim: a launch of (6400|\?) positions does not fit the target's 1000 ×"):
            fit_dimensions(extents, most, limits)
