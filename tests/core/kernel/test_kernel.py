"""Properties of a Kernel derived from its AST: names, reads, analysed accesses; and ASTs that are refused."""
from __future__ import annotations

import random
from typing import Any

import pytest

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel, LinearIndex, Node, ResolvedStage
from svod.errors import CompileError
from tests.hand_kernels import HAND, Ast, gathered_rows, gemm, in_place, mirrored_gemm, padded_window, softmax, two_outputs, variance


def resolved(kernel: Kernel, stage: str, inlined: frozenset[int] = frozenset()) -> ResolvedStage:
    found = kernel.stage_named(stage)
    assert found is not None
    r = kernel.resolve(inlined)[found.index]
    assert r is not None
    return r


def only(r: ResolvedStage, kind: str) -> Node:
    node, = [n for n in r.nodes if n.kind == kind]
    return node


# -- names --------------------------------------------------------------------------------------------
def test_names_of_stages_and_axes() -> None:
    k = Kernel(softmax(5, 37))
    assert [s.name for s in k.stages] == ["s0", "s1", "s2", "s3", "out"]
    assert [a.name for a in k.axes] == ["s0.o0", "s0.o1", "s1.o0", "s1.r0", "s2.o0", "s2.o1", "s3.o0", "s3.r0", "o0", "o1"]
    assert [a.extent for a in k.axes] == [5, 37] * 5
    assert k.reads == ((), (0,), (0, 1), (2,), (2, 3))
    assert k.outs == (0,) and k.output == 4 and k.stages[4].is_output
    assert [s.has_reduce for s in k.stages] == [False, True, False, True, False]
    assert "5 stages" in repr(k) and "5×37" in repr(k)


def test_more_stores_are_named_t1() -> None:
    k = Kernel(two_outputs(5, 13))
    assert [s.name for s in k.stages] == ["out", "t1"] and k.outs == (0, 1)
    assert [a.name for a in k.axes] == ["o0", "o1", "t1.o0", "t1.o1"]


def test_written_slots_are_those_that_are_read_too() -> None:
    assert Kernel(in_place(3, 5)).written == {0} and Kernel(gemm(2, 3, 4)).written == frozenset()


def test_the_key_is_the_content() -> None:
    assert Kernel(gemm(2, 3, 4)).key == Kernel(gemm(2, 3, 4)).key != Kernel(gemm(2, 4, 3)).key


# -- accesses -----------------------------------------------------------------------------------------
def test_affine_accesses_have_a_coefficient_per_axis() -> None:
    k = Kernel(gemm(17, 19, 23))
    a, b, out = resolved(k, "s0"), resolved(k, "s1"), resolved(k, "out")
    assert only(a, "load").linear == LinearIndex(((0, 23), (1, 1)), 0, ()) and only(b, "load").linear == LinearIndex(((0, 19), (1, 1)), 0,
                                                                                                                     ())
    assert out.store == LinearIndex(((0, 19), (1, 1)), 0, ()) and out.store_slot == 0
    reads = {n.arg: n for n in out.nodes if n.kind == "read"}
    assert [d.coefs for d in reads[0].dims] == [((0, 1),), ((2, 1),)] and reads[0].deps == (0, 2)
    assert [d.coefs for d in reads[1].dims] == [((2, 1),), ((1, 1),)] and reads[1].deps == (1, 2)
    assert out.reads == (0, 1) and out.after_reduce == frozenset()


def test_inlined_stages_are_substituted() -> None:
    k = Kernel(mirrored_gemm(11, 18, 7))
    out = resolved(k, "out", frozenset({0, 1}))
    loads = {n.arg: n.linear for n in out.nodes if n.kind == "load"}
    assert loads == {1: LinearIndex(((0, -7), (2, 1)), 70, ()), 2: LinearIndex(((1, 1), (2, 36)), 0, ())}
    assert out.reads == () and k.resolve(frozenset({0, 1}))[0] is None
    assert k.resolve(frozenset({0, 1})) is k.resolve(frozenset({1, 0})), "analysed once"


def test_gates_and_alternatives_are_nodes() -> None:
    r = resolved(Kernel(padded_window(9, 17, 3)), "s0")
    load = only(r, "load")
    assert load.deps == (0, 1) and r.nodes[load.gate].dtype == dtypes.bool and r.nodes[load.alt].arg == 0.0
    assert load.linear == LinearIndex(((0, 17), (1, 1)), -18, ())


def test_gathered_indices_are_atoms() -> None:
    r = resolved(Kernel(gathered_rows(9, 20, 13, 8)), "s0")
    load = next(n for n in r.nodes if n.kind == "load" and n.arg == 1)
    assert load.linear is not None and load.linear.coefs == ((1, 1),)
    (atom, coefficient), = load.linear.atoms
    assert coefficient == 8 and r.nodes[atom].deps == (0,) and load.deps == (0, 1)


def test_axes_of_one_dimension_share_a_number() -> None:
    """Axes of stages that read each other position by position get one number; a row of a window merges two axes."""
    def groups(ast: UOp) -> set[frozenset[str]]:
        kernel = Kernel(ast)
        found: dict[int, set[str]] = {}
        for axis, number in zip(kernel.axes, kernel.dimensions, strict=True):
            found.setdefault(number, set()).add(axis.name)
        return {frozenset(names) for names in found.values() if len(names) > 1}
    assert groups(gemm(8, 16, 4)) == {frozenset(g) for g in (("o0", "s0.o0"), ("o1", "s1.o1"), ("r0", "s0.o1", "s1.o0"))}
    rows, columns = groups(softmax(8, 32))
    if "o0" not in rows:
        rows, columns = columns, rows
    assert {"o0", "s1.o0", "s3.o0"} <= rows and {"o1", "s1.r0", "s3.r0"} <= columns and not rows & columns
    assert not groups(padded_window(8, 9, 3))


def test_what_is_read_after_a_reduction() -> None:
    assert resolved(Kernel(variance(8, 40)), "out").after_reduce == frozenset()
    assert resolved(Kernel(variance(8, 40, again=True)), "out").after_reduce == {1}
    assert resolved(Kernel(softmax(5, 37)), "out").after_reduce == {2, 3}, "all of them where nothing is reduced"


def test_lanes_follow_the_widest_value() -> None:
    assert resolved(Kernel(HAND["wide_and_narrow"]()), "out").lanes_bytes == 8
    assert resolved(Kernel(HAND["elementwise_bool"]()), "out").lanes_bytes == 1
    assert resolved(Kernel(HAND["sums_int8"]()), "out", frozenset({0})).lanes_bytes == 4


@pytest.mark.parametrize("name", HAND)
def test_linear_forms_are_the_expressions(name: str) -> None:
    """Every analysed flat index, computed from its coefficients at random points, equals the value of the AST's expression."""
    kernel = Kernel(HAND[name]())
    rng = random.Random(name)
    for stage in kernel.stages:
        r = resolved(kernel, stage.name)
        loads = [u for u in stage.value.toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op is Ops.LOAD]
        flats = [u.src[0].src[1] for u in loads]
        if any(n.linear is not None and n.linear.atoms for n in r.nodes):
            continue    # gathers have no value without memory
        for _ in range(5):
            point = {kernel.axes[a].node: rng.randrange(kernel.axes[a].extent) for a in r.axes}
            values = [point[kernel.axes[a].node] for a in r.axes]
            wanted = sorted(_value(f, point) for f in dict.fromkeys(flats))
            found = sorted({(n.arg, n.linear) for n in r.nodes if n.kind == "load" and n.linear is not None}, key=repr)
            assert sorted({sum(c * values[a] for a, c in lin.coefs) + lin.const for _, lin in found}) == sorted(set(wanted))


def _value(u: UOp, point: dict[UOp, int]) -> int:
    if u.op is Ops.CONST:
        return int(u.arg)
    if u.op is Ops.RANGE:
        return point[u]
    a, b = (_value(s, point) for s in u.src)
    return {Ops.ADD: a + b, Ops.SUB: a - b, Ops.MUL: a * b, Ops.IDIV: a // b if b else 0, Ops.MOD: a % b if b else 0}[u.op]


# -- refusals -----------------------------------------------------------------------------------------
def bad(build: Any) -> UOp:
    k = Ast()
    y, x = k.param(0, 12), k.param(1, 12)
    i, j, t = k.axes(3, 4, 4)
    result: UOp = build(k, y, x, i, j, t)
    return result


REFUSED = {
    "a SINK of STOREs": lambda k, y, x, i, j, t: k.store(y, i, k.load(x, i), i),
    "fill slots": lambda k, y, x, i, j, t: k.sink(k.store(y, i, k.load(k.param(3, 9), i), i)),
    "different ranges": lambda k, y, x, i, j, t: k.sink(
        k.store(y, i, k.reduce("ADD", k.load(x, i * 4 + j), j) + k.reduce("ADD", k.load(x, i * 4 + t), t), i)),
    "belongs to two stages": lambda k, y, x, i, j, t: k.sink(k.store(y, i, k.read(k.stage(k.load(x, i), i), i), i)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    with pytest.raises(CompileError, match=why):
        Kernel(bad(REFUSED[why]))


def test_a_range_of_another_stage_is_refused_when_it_is_resolved() -> None:
    kernel = Kernel(bad(lambda k, y, x, i, j, t: k.sink(k.store(y, i, k.read(k.stage(k.load(x, i * 4 + j), j), t * 0), i, t))))
    with pytest.raises(CompileError, match="belongs to another stage"):
        kernel.resolve(frozenset())


def test_operations_that_are_no_values_are_refused() -> None:
    program = UOp(Ops.PROGRAM, dtypes.float32)
    kernel = Kernel(bad(lambda k, y, x, i, j, t: k.sink(k.store(y, i, program, i), k.store(x, j, k.load(x, j), j))))
    with pytest.raises(CompileError, match="PROGRAM cannot stand"):
        kernel.resolve(frozenset())


def test_an_extent_may_depend_on_a_variable() -> None:
    size = UOp(Ops.DEFINE_VAR, dtypes.index, (), ("v0", 1, 9))
    row = UOp(Ops.RANGE, dtypes.index, (size,), 7)
    kernel = Kernel(bad(lambda k, y, x, i, j, t: k.sink(k.store(y, row, k.load(x, row), row))))
    assert (kernel.axes[0].extent, kernel.axes[0].bound, kernel.variables) == (9, size, {"v0": (1, 9)})
