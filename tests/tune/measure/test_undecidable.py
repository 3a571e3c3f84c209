"""Elements for which rounding decides whether they are a number or NaN: correct programs pass, and wrong ones still fail.

Correct programs are the evaluator with sums in float32, products and sums fused or not, and functions with an error of one ulp.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import COMPARISONS, TRANSCENDENTAL, Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.spec import evaluate as evaluator
from svod.core.spec.values import apply_alu
from svod.system.quantities import percent
from svod.tune.measure import verify as module
from svod.tune.measure.bounds import error_bounds
from svod.tune.measure.measurer import Verification
from svod.tune.measure.value_ranges import ValueRange, range_of
from svod.tune.measure.verify import Baseline, GuardedBuffers, Reference, verify
from tests import draws
from tests.tune.search_kernels import axis, kernel, load, param, read, reduce, stage, store

Array = np.ndarray[Any, Any]
Run = Callable[[Sequence[Array]], None]
SIZE, DEPTH = 499, 7
ROUNDED = TRANSCENDENTAL | {Ops.SQRT, Ops.RECIPROCAL, Ops.FDIV}
F32 = dtypes.float32


# -- right programs -----------------------------------------------------------------------------------------------------------
def contracted(ast: UOp) -> UOp:
    """The AST with x·y ± c as one operation."""
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        new = u.replace(src=tuple(done[s] for s in u.src))
        if u.op in (Ops.ADD, Ops.SUB) and u.dtype == F32:
            a, b = new.src
            if a.op is Ops.MUL:
                new = UOp(Ops.MULACC, F32, (*a.src, b if u.op is Ops.ADD else b.alu(Ops.NEG)))
            elif b.op is Ops.MUL:
                x, y = b.src
                new = UOp(Ops.MULACC, F32, (x if u.op is Ops.ADD else x.alu(Ops.NEG), y, a))
        done[u] = new
    return done[ast]


def separate(ast: UOp) -> UOp:
    """The AST with a product and a sum in place of each MULACC."""
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        src = tuple(done[s] for s in u.src)
        done[u] = src[0] * src[1] + src[2] if u.op is Ops.MULACC else u.replace(src=src)
    return done[ast]


def off_by_an_ulp(op: Ops, dtype: DType, args: Sequence[Array]) -> Array:
    """An operation whose rounded results have an error of one ulp, up or down depending on their bits."""
    exact = apply_alu(op, dtype, args)
    if op not in ROUNDED or dtype != F32:
        return exact
    exact = np.ascontiguousarray(exact)
    up = exact.view(np.uint32) * np.uint32(2654435761) >> np.uint32(31) == 1
    return np.where(np.isfinite(exact) & (exact != 0), np.nextafter(exact, np.where(up, np.inf, -np.inf).astype(np.float32)), exact)


def program(k: Kernel, ast: UOp, function: Callable[[Ops, DType, Sequence[Array]], Array] = apply_alu) -> Run:
    def run(arrays: Sequence[Array]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluator, "apply_alu", function)
            results = evaluator.evaluate(ast, arrays, exact=False)
        for slot, values in zip(sorted(set(k.outs)), results, strict=True):
            arrays[slot][:] = values
    return run


def right_programs(k: Kernel) -> list[Run]:
    return [program(k, contracted(k.ast)), program(k, separate(k.ast)), program(k, contracted(k.ast), off_by_an_ulp),
            program(k, separate(k.ast), off_by_an_ulp)]


# -- random kernels -----------------------------------------------------------------------------------------------------------
def random_kernel(rng: random.Random) -> Kernel:
    """A random elementwise kernel with sums of products, differences, and functions that are not defined everywhere."""
    i = axis(0, SIZE)
    leaves = [load(param(slot, SIZE), i) for slot in (1, 2, 3)]
    p, q, r = axis(1, SIZE), axis(2, DEPTH), axis(3, DEPTH)
    products = stage(load(param(4, SIZE * DEPTH), p * DEPTH + q) * load(param(5, SIZE * DEPTH), p * DEPTH + q), p, q)
    if rng.random() < 0.4:
        leaves.append(reduce(read(products, i, r), "ADD", r))

    def value(depth: int) -> UOp:
        if depth == 0 or rng.random() < 0.1:
            return rng.choice(leaves) if rng.random() < 0.9 else UOp.const(F32, rng.choice((0.5, 1.0, 2.0, 0.1)))
        kind = rng.choice(("difference", "difference", "fused", "function", "function", "quotient", "product", "power", "where", "step",
                           "clamp", "remainder"))
        a, b = value(depth - 1), value(depth - 1)
        if kind == "difference":
            return a * value(0) - b
        if kind == "fused":
            return UOp(Ops.MULACC, F32, (a, value(0), b.alu(Ops.NEG)))
        if kind == "function":
            return a.alu(rng.choice((Ops.SQRT, Ops.SQRT, Ops.LOG, Ops.LOG2, Ops.RECIPROCAL, Ops.EXP, Ops.SIN, Ops.ABS)))
        if kind == "quotient":
            return a.alu(Ops.FDIV, b)
        if kind == "product":
            return a * b
        if kind == "power":
            return a.alu(Ops.POW, b if rng.random() < 0.3 else UOp.const(F32, rng.choice((2.0, 3.0, 0.5, -1.5))))
        if kind == "where":
            other = rng.choice((value(depth - 1), UOp.const(F32, float("nan")), UOp.const(F32, 0.0), UOp.const(F32, float("-inf"))))
            limit = rng.choice((value(0), UOp.const(F32, 0.0), UOp.const(F32, 1.0)))
            return a.alu(rng.choice(sorted(COMPARISONS, key=lambda op: op.value)), limit).alu(Ops.WHERE, b, other)
        if kind == "step":
            return a - b.alu(rng.choice((Ops.FLOOR, Ops.TRUNC, Ops.ROUND))) * value(0)
        if kind == "remainder":
            return a.alu(Ops.MOD, UOp.const(F32, rng.choice((0.25, 1.0)))) if rng.random() < 0.5 else a.cast(dtypes.float16).cast(F32)
        return a.alu(Ops.MIN, 1.0).alu(Ops.MAX, rng.choice((-1.0, 0.0, 0.001)))
    root = value(rng.randint(2, 4)).alu(rng.choice((Ops.SQRT, Ops.LOG, Ops.NEG, Ops.RECIPROCAL)))
    used = sorted(root.walk(Ops.PARAM), key=lambda u: u.arg.slot)
    root = root.substitute({u: param(at, u.arg.size) for at, u in enumerate(used, 1)})
    return kernel(store(param(0, SIZE), i, root, i))


# -- wrong programs -----------------------------------------------------------------------------------------------------------
def with_wrong_index(k: Kernel) -> UOp:
    """The AST with an error: it reads the neighbours of one input's elements instead of the elements."""
    first = min((u for u in k.ast.walk(Ops.LOAD)), key=lambda u: u.src[0].src[0].arg.slot)
    p, flat = first.src[0].src
    return k.ast.substitute({first: load(p, (flat + 1) % p.arg.size)})


def with_wrong_last_element(k: Kernel) -> UOp:
    """The AST with an error: instead of one input's last element it reads the one before it."""
    first = min((u for u in k.ast.walk(Ops.LOAD)), key=lambda u: u.src[0].src[0].arg.slot)
    p, flat = first.src[0].src
    return k.ast.substitute({first: load(p, flat.alu(Ops.MIN, p.arg.size - 2))})


# -- tests --------------------------------------------------------------------------------------------------------------------
def judge(k: Kernel, run: Run, reference: Reference | None = None, **more: Any) -> Verification:
    return verify(reference or Reference(k), run, GuardedBuffers(k), **more)


@pytest.mark.slow
def test_right_programs_of_random_kernels_pass_and_wrong_ones_do_not() -> None:
    kernels = found = 0
    for seed in range(draws.count(60)):
        k = random_kernel(random.Random(seed))
        reference = Reference(k)
        for number, run in enumerate(right_programs(k)):
            verification = judge(k, run, reference)
            assert verification.right is not False, f"seed {seed}, program {number}: {verification.reason}"
        if any(k.ast.walk(Ops.LOAD)):
            kernels += 2
            found += (judge(k, program(k, with_wrong_index(k)), reference).right is False) \
                + (judge(k, program(k, with_wrong_last_element(k)), reference).right is False)
    # some kernels do not depend on the input that is read wrongly, or only at elements that are infinite
    assert found > 0.8 * kernels


def half_undecidable(n: int) -> Kernel:
    """A kernel that computes √(a·b - b·a) at even positions and √(a·b - c·c) at odd ones."""
    i = axis(0, n)
    a, b, c = (load(param(slot, n), i) for slot in (1, 2, 3))
    return kernel(store(param(0, n), i, (i % 2 < 1).alu(Ops.WHERE, a * b - b * a, a * b - c * c).alu(Ops.SQRT), i))


def test_a_fused_product_may_make_nans_of_zeros_and_nothing_else() -> None:
    k = half_undecidable(400)
    fused, reference = program(k, contracted(k.ast)), Reference(k)
    reals = next(n for n, s in enumerate(reference.sets) if s.kind == "reals")
    expected = reference.expected(reals)[0]
    assert expected.tolerance is not None
    undecidable = expected.tolerance == np.inf
    given = [v.whole() for v in reference.given(reals)]
    np.testing.assert_array_equal(undecidable, np.arange(400) % 2 == 0)
    fused(given)
    assert (np.isnan(given[0]) & undecidable).any() and not np.isnan(expected.want[undecidable]).any(), "no element tells"
    result = judge(k, fused, reference)
    assert result.right, result.reason
    assert f"{percent(undecidable.sum() / 800)} of the elements undecidable" in result.how
    number, nan = (np.flatnonzero(~undecidable & found)[0] for found in (expected.want > 0, np.isnan(expected.want)))

    def damaged(at: int, value: float) -> Run:
        def run(arrays: Sequence[Array]) -> None:
            fused(arrays)
            if np.array_equal(arrays[1], given[1]):
                arrays[0][at] = value
        return run
    edge = np.flatnonzero(undecidable)[0]
    for at, value, right in ((edge, 7.0, True), (edge, np.nan, True), (number, expected.want[number] * np.float32(1 + 1e-5), False),
                             (number, np.nan, False), (nan, 0.0, False)):
        assert judge(k, damaged(at, value), reference).right is right, (at, value)


@pytest.mark.parametrize("wrong", [with_wrong_index, with_wrong_last_element])
def test_a_wrong_difference_under_a_root_is_found(wrong: Callable[[Kernel], UOp]) -> None:
    """√(Σ x·y - z): programs that leave out a product of the sum, or read an element at another position, are found wrong."""
    i, p, q, r = axis(0, SIZE), axis(1, SIZE), axis(2, DEPTH), axis(3, DEPTH)
    x, y = (load(param(slot, SIZE * DEPTH), p * DEPTH + q) for slot in (2, 3))

    def root(products: UOp) -> Kernel:
        total = reduce(read(stage(products, p, q), i, r), "ADD", r)
        return kernel(store(param(0, SIZE), i, (total - load(param(1, SIZE), i)).alu(Ops.SQRT), i))
    k = root(x * y)
    for run in right_programs(k):
        result = judge(k, run)
        assert result.right, result.reason
    assert judge(k, program(k, wrong(k))).right is False
    too_few = root((q < DEPTH - 1).alu(Ops.WHERE, x * y, 0.0))
    assert judge(k, program(k, too_few.ast)).right is False


def test_inputs_are_drawn_where_elements_can_be_compared() -> None:
    """1 / ((a + 10⁶) - (10⁶ - b)): the sums round to multiples of 1/16, so that with inputs of both signs a + b is often rounded to 0."""
    i = axis(0, SIZE)
    a, b = load(param(1, SIZE), i), load(param(2, SIZE), i)
    million = UOp.const(F32, 1e6)
    k = kernel(store(param(0, SIZE), i, ((a + million) - (million - b)).alu(Ops.RECIPROCAL), i))
    reference = Reference(k)
    reals = next(n for n, s in enumerate(reference.sets) if s.kind == "reals")
    expected = reference.expected(reals)[0]
    assert reference.sets[reals].low > 0 and expected.tolerance is not None and np.mean(expected.tolerance == np.inf) < 0.1
    for run in right_programs(k):
        assert judge(k, run, reference).right

    def wrong_for_reals(arrays: Sequence[Array]) -> None:
        inputs = [arrays[0], np.floor(arrays[1]), np.floor(arrays[2])]
        program(k, k.ast)(inputs)
    result = judge(k, wrong_for_reals, reference)
    assert result.right is False and "reals" in result.reason


def test_nothing_is_said_where_nothing_can_be_compared() -> None:
    i = axis(0, SIZE)
    grown = load(param(1, SIZE), i).alu(Ops.EXP)
    k = kernel(store(param(0, SIZE), i, (grown - grown).alu(Ops.SQRT), i))
    for run in right_programs(k):
        result = judge(k, run)
        assert result.right is None and "rounding decides every element of output 0" in result.reason


def sampled(k: Kernel) -> tuple[Reference, GuardedBuffers, Baseline, Run, int]:
    """(a sampled reference, buffers, the outputs of the unchanged program as a baseline, the program with fused products, which passes and
    was run last, the index of the set of real inputs)."""
    reference, buffers, baseline = Reference(k), GuardedBuffers(k), Baseline([])
    fused = program(k, contracted(k.ast))
    assert not reference.full and verify(reference, program(k, k.ast), buffers, keep=baseline).right
    result = verify(reference, fused, buffers, baseline)
    assert result.right, result.reason
    return reference, buffers, baseline, fused, next(n for n, s in enumerate(reference.sets) if s.kind == "reals")


def test_many_undecidable_elements_do_not_hide_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is sampled, and more elements are NaN in only one of the programs than are compared with the reference."""
    monkeypatch.setattr(module, "FULL_COST", 0)
    k = half_undecidable(20_011)
    reference, buffers, baseline, fused, reals = sampled(k)
    one_is_nan = np.isnan(buffers.arrays[0]) != np.isnan(baseline.outputs[reals][0])
    assert one_is_nan.sum() > 2 * module.POINTS
    flat = reference.expected(reals)[0].flat
    assert flat is not None
    number = baseline.outputs[reals][0] > 0.1
    number[flat] = False
    unseen = int(np.flatnonzero(number)[-1])

    def one_wrong(arrays: Sequence[Array]) -> None:
        fused(arrays)
        if (arrays[1] % 1).any():       # only for real inputs: with small integers no element is undecidable
            arrays[0][unseen] *= np.float32(1.01)
    result = verify(reference, one_wrong, buffers, baseline)
    assert result.right is False and f"reals; the worst is element {unseen}" in result.reason


def test_an_element_with_a_large_bound_does_not_hide_other_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """a / (a·b - c) with a sampled reference: the bounds of elements next to the pole are 1,000 times those of most elements."""
    monkeypatch.setattr(module, "FULL_COST", 0)
    i = axis(0, 20_011)
    a, b, c = (load(param(slot, 20_011), i) for slot in (1, 2, 3))
    k = kernel(store(param(0, 20_011), i, a.alu(Ops.FDIV, a * b - c), i))
    reference, buffers, baseline, fused, reals = sampled(k)
    [expected] = reference.expected(reals)
    assert expected.tolerance is not None and expected.flat is not None
    largest = np.max(expected.tolerance, where=np.isfinite(expected.tolerance), initial=0.0)
    assert largest > 1000 * np.median(expected.tolerance)
    size = np.abs(baseline.outputs[reals][0])
    usual = (size > 0.5) & (size < 1.0)
    usual[expected.flat] = False
    unseen = int(np.flatnonzero(usual)[0])

    def one_wrong(arrays: Sequence[Array]) -> None:
        fused(arrays)
        if (arrays[1] % 1).any():
            arrays[0][unseen] += np.float32(largest)
    result = verify(reference, one_wrong, buffers, baseline)
    assert result.right is False and f"element {unseen}" in result.reason


@pytest.mark.slow
def test_the_bound_of_a_long_chain_of_quotients_is_short() -> None:
    """The sum of 40 steps of Newton's √y = ½·(√y + y/√y): each quotient may be undecidable, and each step reads the one before twice, but
    the expression of the bound must not grow exponentially."""
    i, r = axis(0, 5), axis(1, 7)
    y = value = load(param(1, 35), i * 7 + r) * load(param(2, 35), i * 7 + r) + 1.5
    for _ in range(40):
        value = (value + y.alu(Ops.FDIV, value)) * 0.5
    k = kernel(store(param(0, 5), i, reduce(value, "ADD", r), i))
    bound = error_bounds(k.ast)[0]
    assert bound is not None and len(bound.toposort()) < 100 * len(k.ast.toposort())
    assert judge(k, program(k, k.ast)).right


@pytest.mark.parametrize("divided", [False, True])
def test_a_mask_is_certain_also_where_it_is_scaled_by_what_was_computed(divided: bool) -> None:
    """exp(x · s) or exp(x / s), where s = z² + ½ and x is -∞ at odd positions: the sums of rows are decidable."""
    i, r = axis(0, 5), axis(1, 8)
    z = load(param(2, 5), i)
    x = (r % 2 < 1).alu(Ops.WHERE, load(param(1, 40), i * 8 + r), UOp.const(F32, float("-inf")))
    scaled = x.alu(Ops.FDIV if divided else Ops.MUL, z * z + 0.5)
    k = kernel(store(param(0, 5), i, reduce(scaled.alu(Ops.EXP), "ADD", r), i))
    reference = Reference(k)
    for expected in (e for number in range(len(reference.sets)) for e in reference.expected(number)):
        assert expected.tolerance is not None and (expected.tolerance < 1e-4 * np.abs(expected.want)).all()
    for run in right_programs(k):
        assert judge(k, run, reference).right
    assert judge(k, program(k, with_wrong_index(k)), reference).right is False


X, Y = (load(param(slot, 97), axis(0, 97)) for slot in (1, 2))
CLIPPED = X.alu(Ops.MAX, -1.0).alu(Ops.MIN, 1.0)


@pytest.mark.parametrize(("value", "low", "high"), [
    (X, -np.inf, np.inf), (X.alu(Ops.ABS), 0.0, np.inf), (X * X, 0.0, np.inf), (X * Y, -np.inf, np.inf), (CLIPPED, -1.0, 1.0),
    (UOp.const(F32, 1.0) - CLIPPED * CLIPPED, 0.0, 1.0), (UOp(Ops.MULACC, F32, (CLIPPED, CLIPPED, X * X)), 0.0, np.inf),
    (CLIPPED.alu(Ops.NEG) + 0.1, float(np.float32(-0.9)), float(np.float32(1.1))), (X.alu(Ops.EXP) + 1.0, 1.0, np.inf),
    (X.alu(Ops.ABS).alu(Ops.FDIV, Y * Y), 0.0, np.inf), ((X * 3.0).alu(Ops.MOD, UOp.const(F32, 0.5)), 0.0, 0.5),
    ((X < Y).alu(Ops.WHERE, CLIPPED, UOp.const(F32, 3.0)), -1.0, 3.0), ((CLIPPED * 0.7).alu(Ops.FLOOR), -1.0, 0.0),
    (CLIPPED.cast(dtypes.bfloat16).cast(F32) * 2.0, -2.0, 2.0), (X < Y, 0.0, 1.0)])
def test_values_lie_in_their_intervals(value: UOp, low: float, high: float) -> None:
    known: dict[UOp, ValueRange] = {}
    for u in value.toposort():
        known[u] = range_of(u, known)
    assert known[value] == (low, high)
    rng = np.random.default_rng(0)
    ast = UOp(Ops.SINK, dtypes.void, (store(param(0, 97), axis(0, 97), value.cast(F32), axis(0, 97)),))
    for scale in (0.5, 2.0, 1e6):
        inputs = [np.zeros(97, np.float32), *(rng.uniform(-scale, scale, 97).astype(np.float32) for _ in range(2))]
        got = evaluator.evaluate(ast, inputs, exact=False)[0]
        assert ((got >= low) & (got <= high)).all()


@pytest.mark.parametrize("combiner", ["ARGMAX", "ARGMIN"])
def test_the_place_of_an_extremum_is_certain_where_nothing_else_reaches_it(combiner: str) -> None:
    """The position of the extremum of sin(x) along rows. In the first rows the extremum occurs twice."""
    rows, columns = 9, 13
    i, j, p, q = (axis(at, n) for at, n in enumerate((rows, columns, rows, columns)))
    whole = stage(load(param(1, rows * columns), p * columns + q).alu(Ops.SIN), p, q)
    extremum = UOp(Ops.REDUCE, F32, (read(whole, i, j), j.cast(dtypes.int32), j), (combiner, 2))
    k = kernel(store(param(0, rows, dtypes.int32), i, UOp(Ops.GEP, dtypes.int32, (extremum,), 1), i))
    bound = error_bounds(k.ast)[0]
    assert bound is not None
    x = np.random.default_rng(1).uniform(-1, 1, (rows, columns)).astype(np.float32)
    x[:3, 4] = x[:3, 7] = 1.25 if combiner == "ARGMAX" else -1.25
    room = [np.zeros(rows, np.int32), x.reshape(-1), np.zeros(rows)]
    tolerance = evaluator.evaluate(UOp(Ops.SINK, dtypes.void, (bound,)), room)[0]
    np.testing.assert_array_equal(tolerance, [np.inf] * 3 + [0.0] * 6)
    for run in right_programs(k):
        assert judge(k, run).right

    def next_place(arrays: Sequence[Array]) -> None:
        program(k, k.ast)(arrays)
        arrays[0][:] = (arrays[0] + 1) % columns
    assert judge(k, next_place).right is False


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_sign_bit_and_a_test_for_nan_are_certain_apart_from_zero(shift: float) -> None:
    """copysign(2, x·y - z·z + shift), if that is a number."""
    i = axis(0, SIZE)
    x, y, z = (load(param(slot, SIZE), i) for slot in (1, 2, 3))
    value = x * y - z * z + shift
    two = UOp.const(F32, 2.0)
    sign = (UOp(Ops.BITCAST, dtypes.int32, (value,)) < 0).alu(Ops.WHERE, two.alu(Ops.NEG), two)
    k = kernel(store(param(0, SIZE), i, value.alu(Ops.CMPEQ, value).alu(Ops.WHERE, sign, UOp.const(F32, float("nan"))), i))
    reference = Reference(k)
    assert all(e.tolerance is None or (e.tolerance < 1e-5).mean() > 0.99 for n in range(len(reference.sets)) for e in reference.expected(n))
    for run in right_programs(k):
        assert judge(k, run, reference).right
    assert judge(k, program(k, with_wrong_index(k)), reference).right is False


def test_a_remainder_is_uncertain_next_to_multiples_only() -> None:
    i = axis(0, 5)
    x = load(param(1, 5), i)
    k = kernel(store(param(0, 5), i, (x * x).alu(Ops.MOD, UOp.const(F32, 0.25)), i))
    bound = error_bounds(k.ast)[0]
    assert bound is not None
    room = [np.zeros(5, np.float32), np.array([0.5, 0.7, np.sqrt(0.75), 0.1, 1.0], np.float32), np.zeros(5)]
    tolerance = evaluator.evaluate(UOp(Ops.SINK, dtypes.void, (bound,)), room)[0]
    np.testing.assert_array_equal(tolerance > 0.25, [True, False, True, False, True])
    assert (tolerance[[1, 3]] < 1e-6).all()
