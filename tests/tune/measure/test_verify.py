"""Verification: correct programs pass and wrong ones do not, for all dtypes."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.summation import SUMS
from svod.core.ir.uop import TRANSCENDENTAL, Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import from_float, to_float
from svod.tune.measure import verify as module
from svod.tune.measure.bounds import error_bounds, summation_factor
from svod.tune.measure.verify import (
    COMPARED_ELEMENTS,
    Baseline,
    GuardedBuffers,
    InputSet,
    Reference,
    Repeated,
    beyond,
    compare,
    draw,
    make_inputs,
    verify,
    whole,
)
from tests.draws import a_half
from tests.tune.search_kernels import axis, elementwise, gather, gemm, kernel, load, param, read, reduce, row_reduce, softmax, stage, store

Arrays = Sequence[np.ndarray[Any, Any]]


def right(k: Kernel) -> Callable[[Arrays], None]:
    """A correct program of the kernel: the evaluator."""
    def run(arrays: Arrays) -> None:
        for slot, values in zip(sorted(set(k.outs)), evaluate(k.ast, arrays, exact=False), strict=True):
            arrays[slot][:] = values
    return run


def check(k: Kernel, run: Callable[[Arrays], None], **more: Any) -> tuple[bool | None, str, str]:
    result = verify(Reference(k), run, GuardedBuffers(k), **more)
    return result.right, result.how, result.reason


KERNELS = {
    "gemm": gemm(5, 7, 33), "gemm f16": gemm(5, 7, 33, dtypes.float16, dtypes.float32),
    "gemm bf16": gemm(5, 7, 33, dtypes.bfloat16, dtypes.float32),
    "gemm f64": gemm(4, 3, 17, dtypes.float64), "gemm i32": gemm(4, 3, 17, dtypes.int32),
    "gemm u8": gemm(4, 3, 17, dtypes.uint8, dtypes.uint32),
    "sum": row_reduce(3, 100), "max": row_reduce(3, 100, "MAX"), "min": row_reduce(3, 100, "MIN"), "product": row_reduce(3, 50, "MUL"),
    "max i8": row_reduce(3, 20, "MAX", dtypes.int8), "elementwise": elementwise(67), "one": elementwise(1), "softmax": softmax(3, 37),
    "masked softmax": softmax(13, 37, causal=True),
    "gather": gather(13, 29, 5),
}


@pytest.mark.parametrize("name", a_half(KERNELS))
def test_a_right_program_passes(name: str) -> None:
    ok, how, reason = check(KERNELS[name], right(KERNELS[name]))
    assert ok, reason
    assert "every element" in how


def sequential(k: Kernel) -> Callable[[Arrays], None]:
    """A GEMM that adds the products one by one in float32, which is the worst order of summation."""
    m, n = (k.axes[a].extent for a in k.stages[k.output].outs)
    depth = k.axes[k.stages[k.output].reds[0]].extent

    def run(arrays: Arrays) -> None:
        dtype = k.params[1].dtype
        a, b = to_float(arrays[1], dtype).reshape(m, depth), to_float(arrays[2], dtype).reshape(depth, n)
        total = np.zeros((m, n), a.dtype)
        for i in range(depth):
            total += a[:, i:i + 1] * b[i]
        arrays[0][:] = from_float(total.ravel(), dtype)
    return run


@pytest.mark.parametrize("k", [gemm(3, 4, 5000), gemm(3, 4, 1000, dtypes.bfloat16, dtypes.float32)])
def test_another_order_of_summation_passes(k: Kernel) -> None:
    ok, _, reason = check(k, sequential(k))
    assert ok, reason


def test_bfloat16_sums_are_held_to_the_accumulator() -> None:
    """A bound of K·eps of bfloat16 would be 32 for K = 4096, and everything would pass. The bound is that of float32 plus one rounding."""
    k = gemm(3, 4, 4096, dtypes.bfloat16, dtypes.float32)
    plain = sequential(k)

    def one_product_too_few(arrays: Arrays) -> None:
        plain(arrays)
        a = to_float(arrays[1], dtypes.bfloat16).reshape(3, 4096)
        b = to_float(arrays[2], dtypes.bfloat16).reshape(4096, 4)
        arrays[0][:] = from_float((a[:, :-1].astype(np.float64) @ b[:-1]).ravel(), dtypes.bfloat16)

    ok, _, reason = check(k, one_product_too_few)
    assert not ok
    assert "integers" in reason


def after(k: Kernel, damage: Callable[[Arrays], None]) -> Callable[[Arrays], None]:
    plain = right(k)

    def run(arrays: Arrays) -> None:
        plain(arrays)
        damage(arrays)
    return run


def _address(array: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
    """A view of the byte at `offset` from the start of an array, which may lie outside of the array."""
    import ctypes
    return np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(array.ctypes.data + offset))


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda a: a[1].__setitem__(0, a[1][0] + 1), "input 1 was changed"),
    (lambda a: _address(a[0], a[0].nbytes).__setitem__(0, 1), "after the end of buffer 0"),
    (lambda a: _address(a[0], -1).__setitem__(0, 1), "before buffer 0"),
    (lambda a: _address(a[2], a[2].nbytes + 64).__setitem__(0, 1), "after the end of buffer 2"),
    (lambda a: a[0].__setitem__(5, np.nan), "output 0"),
    (lambda a: a[0].__setitem__(5, a[0][5] + 1), "output 0"),
])
def test_damage_is_seen(damage: Callable[[Arrays], None], reason: str) -> None:
    k = gemm(5, 7, 33)
    ok, _, found = check(k, after(k, damage))
    assert not ok
    assert reason in found


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.int8, dtypes.bool])
def test_an_element_that_is_not_written_is_seen(dtype: DType) -> None:
    y, x = param(0, 40, dtype), param(1, 40, dtype)
    i = axis(0, 40)
    k = kernel(store(y, i, load(x, i), i))

    def all_but_the_last(arrays: Arrays) -> None:
        arrays[0][:-1] = arrays[1][:-1]
    assert check(k, right(k))[0]
    assert not check(k, all_but_the_last)[0]


def test_a_store_to_part_of_a_buffer_leaves_the_rest() -> None:
    y, x = param(0, 40), param(1, 10)
    i = axis(0, 10)
    k = kernel(store(y, i * 3 + 1, load(x, i), i))
    assert check(k, right(k))[0]
    assert not check(k, after(k, lambda a: a[0].__setitem__(0, 0.0)))[0]


def test_what_lies_between_the_parts_of_a_large_output_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes rows of a wider matrix must not change the other columns, also if only sampled points are compared."""
    monkeypatch.setattr("svod.tune.measure.verify.FULL_COST", 0)
    y, x = param(0, 100 * 30 - 10), param(1, 100 * 20)
    i, j = axis(0, 100), axis(1, 20)
    k = kernel(store(y, i * 30 + j, load(x, i * 20 + j), i, j))
    assert check(k, right(k))[0]
    for position in (20, 29, 30 * 98 + 20, 30 * 98 + 29):
        ok, _, reason = check(k, after(k, lambda a, at=position: a[0].__setitem__(at, 0.0)))
        assert not ok and "between the parts" in reason


@pytest.mark.parametrize(("combiner", "identity"), [("MAX", 0.0), ("MIN", 0.0)])
def test_a_wrong_identity_is_seen(combiner: str, identity: float) -> None:
    """A maximum that starts from 0 gives the right result for every row with a positive value, so negative inputs are needed."""
    k = row_reduce(3, 100, combiner)
    clamp = np.maximum if combiner == "MAX" else np.minimum
    ok, _, reason = check(k, after(k, lambda a: a[0].__setitem__(slice(None), clamp(a[0], identity))))
    assert not ok
    assert "negative" in reason or "positive" in reason


def test_in_place_kernels_get_their_inputs_back() -> None:
    y = param(0, 30)
    i = axis(0, 30)
    k = kernel(store(y, i, load(y, i) * 2, i))

    def double(arrays: Arrays) -> None:
        arrays[0] *= 2
    assert check(k, double)[0]
    assert not check(k, lambda a: None)[0]


def test_gathered_indices_stay_inside_their_table() -> None:
    k = gather(1000, 7, 3)
    index = make_inputs(k, Reference(k).sets[0])[2].whole()
    assert index.min() == 0
    assert index.max() == 6


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16])
def test_bits_that_are_read_as_floats_are_those_of_floats(dtype: DType) -> None:
    """Small integers, read as the bits of floats, would be numbers next to 0, whose products cannot be told from 0."""
    n = 23
    i, r = axis(0, 5), axis(1, n)
    a, b = (UOp(Ops.BITCAST, dtype, (load(param(slot, 5 * n, dtypes.uint16), i * n + r),)).cast(dtypes.float32) for slot in (1, 2))
    k = kernel(store(param(0, 5), i, reduce(a * b, "ADD", r), i))
    reference = Reference(k)
    [integers, reals] = (reference.expected(number)[0] for number in range(2))
    assert integers.tolerance is None and np.any(integers.want != 0), "small integers are exact, whatever their bits are called"
    assert reals.tolerance is not None and np.all(reals.tolerance < 1e-4 * np.abs(reals.want).max())

    def without(skipped: int) -> Callable[[Arrays], None]:
        def run(arrays: Arrays) -> None:
            x, y = (to_float(values.view(to_numpy(dtype)).reshape(5, n), dtype).astype(np.float64) for values in arrays[1:])
            arrays[0][:] = (x * y)[:, :n - skipped].sum(1)
        return run
    assert check(k, without(0))[0]
    assert check(k, without(1))[0] is False


@pytest.mark.parametrize("op", [Ops.LOG, Ops.SQRT])
def test_inputs_are_drawn_where_the_reference_is_finite(op: Ops) -> None:
    y, x = param(0, 200), param(1, 200)
    i = axis(0, 200)
    k = kernel(store(y, i, load(x, i).alu(op), i))
    reference = Reference(k)
    assert all(s.low >= 0 for s in reference.sets)
    for n in range(len(reference.sets)):
        assert np.isfinite(reference.expected(n)[0].want).mean() > 0.5


def test_a_long_product_does_not_vanish() -> None:
    reference = Reference(row_reduce(3, 3000, "MUL"))
    reals = next(n for n, s in enumerate(reference.sets) if s.kind == "reals")
    want = reference.expected(reals)[0].want
    assert np.isfinite(want).all()
    assert (want != 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.bool_])
@pytest.mark.parametrize(("part", "size"), [(7, 7), (7, 8), (7, 21), (7, 50), (5, 1), (1, 9), (3, 0), (0, 0), (40_009, 123_457)])
def test_repeated_elements_are_those_of_the_whole_array(part: int, size: int, dtype: type) -> None:
    rng = np.random.default_rng(part)
    given = Repeated(rng.integers(0, 2, part).astype(dtype), size)
    want = np.resize(given.part, size)
    array = np.empty(size, dtype)
    given.write(array)
    np.testing.assert_array_equal(array, want)
    np.testing.assert_array_equal(given.whole(), want)
    assert given.is_held_by(array)
    mask = rng.integers(0, 2, size).astype(np.bool_)
    np.testing.assert_array_equal(given.at(mask), want[mask])
    for i in {0, size // 2, size - 1} if size else ():
        array[i] = 1 - array[i]
        assert not given.is_held_by(array)
        array[i] = want[i]


def test_large_inputs_repeat_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAWN", 101)
    k = gemm(17, 23, 40)
    out, a, b = make_inputs(k, Reference(k).sets[0])
    assert [(v.part.size, v.size) for v in (out, a, b)] == [(101, 17 * 23), (101, 17 * 40), (101, 40 * 23)]
    assert Reference(k, keep=0).given(1)[2].part.tolist() == Reference(k).given(1)[2].part.tolist()
    assert len(np.unique(a.part)) > 2 and not np.array_equal(a.part, b.part)
    assert check(k, right(k))[0]
    ok, _, reason = check(k, after(k, lambda arrays: arrays[1].__setitem__(-1, 77.0)))
    assert not ok and "input 1 was changed" in reason


# -- sampled comparison -------------------------------------------------------------------------------------------------------
@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_COST", 0)


@pytest.mark.usefixtures("sampled")
def test_large_kernels_are_sampled_and_compared_with_a_baseline() -> None:
    k = gemm(61, 67, 40)
    reference, buffers = Reference(k), GuardedBuffers(k)
    baseline = Baseline([])
    result = verify(reference, right(k), buffers, keep=baseline)
    assert result.right, result.reason
    assert "1024 points" in result.how
    assert len(baseline.outputs) == len(reference.sets)
    assert verify(reference, sequential(k), buffers, baseline).right
    flat = set(reference.expected(0)[0].flat.tolist())     # type: ignore[union-attr]
    unseen = next(i for i in range(61 * 67) if i not in flat)
    result = verify(reference, after(k, lambda a: a[0].__setitem__(unseen, a[0][unseen] + 1)), buffers, baseline)
    assert not result.right
    assert f"the worst is element {unseen}" in result.reason
    assert verify(reference, after(k, lambda a: a[0].__setitem__(unseen, a[0][unseen] + 1)), buffers).right     # no baseline, not seen


@pytest.mark.usefixtures("sampled")
def test_a_wrong_baseline_condemns_nothing_that_is_right() -> None:
    k = gemm(61, 67, 40)
    reference, buffers = Reference(k), GuardedBuffers(k)
    unseen = next(i for i in range(61 * 67) if i not in set(reference.expected(0)[0].flat.tolist()))     # type: ignore[union-attr]
    baseline = Baseline([])
    assert verify(reference, after(k, lambda a: a[0].__setitem__(unseen, 77.0)), buffers, keep=baseline).right
    result = verify(reference, right(k), buffers, baseline)
    assert result.right, result.reason


@pytest.mark.usefixtures("sampled")
def test_elements_of_a_larger_bound_than_the_sampled_ones_are_held_to_their_own() -> None:
    """1 / Σ x·y, with sums near zero: another order of summation changes a few elements by far more than all others."""
    rows, depth = 19_997, 50
    y, a, b = param(0, rows), param(1, rows * depth), param(2, rows * depth)
    i, j, r, c = axis(0, rows), axis(1, rows), axis(2, depth), axis(3, depth)
    whole_ = stage(load(a, j * depth + r) * load(b, j * depth + r), j, r)
    k = kernel(store(y, i, reduce(read(whole_, i, c), "ADD", c).alu(Ops.RECIPROCAL), i))

    def summed_backwards(arrays: Arrays) -> None:
        products = arrays[1].reshape(rows, depth) * arrays[2].reshape(rows, depth)
        total = np.zeros(rows, np.float32)
        for n in reversed(range(depth)):
            total += products[:, n]
        with np.errstate(divide="ignore"):
            arrays[0][:] = 1 / total
    reference, buffers, baseline = Reference(k), GuardedBuffers(k), Baseline([])
    assert verify(reference, right(k), buffers, keep=baseline).right
    reals = next(n for n, s in enumerate(reference.sets) if s.kind == "reals")
    summed_backwards(buffers.arrays)
    largest = float(np.max(reference.expected(reals)[0].tolerance))     # type: ignore[arg-type]
    assert beyond(buffers.arrays[0], baseline.outputs[reals][0], 2 * largest, dtypes.float32).total, "no element tells"
    result = verify(reference, summed_backwards, buffers, baseline)
    assert result.right, result.reason


@pytest.mark.usefixtures("sampled")
def test_each_output_is_held_to_a_tolerance_of_its_own() -> None:
    """A large and a small output: an error that the tolerance of the first allows exceeds the tolerance of the second."""
    n, depth = 3000, 30
    x = param(2, n * depth)

    def output(slot: int, factor: float) -> UOp:
        i, j, r, c = (axis(4 * slot + at, extent) for at, extent in enumerate((n, n, depth, depth)))
        total = reduce(read(stage(load(x, j * depth + r), j, r), i, c), "ADD", c)
        return store(param(slot, n), i, total * factor, i)
    k = kernel(output(0, 10_000.5), output(1, 1e-4))
    reference, buffers, baseline = Reference(k), GuardedBuffers(k), Baseline([])
    assert verify(reference, right(k), buffers, keep=baseline).right
    flats = [set(e.flat.tolist()) for e in reference.expected(0) if e.flat is not None]
    unseen = next(at for at in range(n) if at not in flats[1])
    result = verify(reference, after(k, lambda a: a[1].__setitem__(unseen, a[1][unseen] * 1.01)), buffers, baseline)
    assert result.right is False and f"output 1 are wrong with integers; the worst is element {unseen}" in result.reason


@pytest.mark.usefixtures("sampled")
def test_a_store_to_scattered_places_leaves_the_places_between() -> None:
    """With a sampled reference, positions that no STORE writes must keep their content."""
    y, x = param(0, 9000), param(1, 3000)
    i = axis(0, 3000)
    k = kernel(store(y, (i * 7) % 3000 * 3, load(x, i), i))
    reference, buffers, baseline = Reference(k), GuardedBuffers(k), Baseline([])
    assert verify(reference, right(k), buffers, keep=baseline).right
    assert verify(reference, right(k), buffers, baseline).right
    result = verify(reference, after(k, lambda a: a[0].__setitem__(4, 1.0)), buffers, baseline)
    assert result.right is False, result.how


@pytest.mark.usefixtures("sampled")
def test_corners_and_the_ends_of_axes_are_among_the_points() -> None:
    k = gemm(61, 67, 4)
    reference = Reference(k)
    rows, columns = reference._points[0]
    points = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert len(rows) == module.POINTS
    assert {(0, 0), (60, 0), (0, 66), (60, 66)} <= points
    assert {60, 59} <= set(rows.tolist())


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("name", a_half(KERNELS))
def test_a_right_program_passes_when_sampled(name: str) -> None:
    ok, how, reason = check(KERNELS[name], right(KERNELS[name]))
    assert ok, reason
    assert "points" in how


# -- bounds -------------------------------------------------------------------------------------------------------------------
def bound_of(k: Kernel, args: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    bound = error_bounds(k.ast)[0]
    assert bound is not None
    room: list[np.ndarray[Any, Any]] = [*args, np.zeros(args[0].size)]
    return evaluate(UOp(Ops.SINK, dtypes.void, (bound,)), room)[0]


def test_the_bound_of_a_sum_is_its_formula() -> None:
    k = row_reduce(2, 400)
    x = np.random.default_rng(0).uniform(-1, 1, 800).astype(np.float32)
    want = np.abs(x.astype(np.float64).reshape(2, 400)).sum(1) * summation_factor(400, 2.0**-24, SUMS) \
        + np.abs(x.astype(np.float64).reshape(2, 400).sum(1)) * 2.0**-24
    np.testing.assert_allclose(bound_of(k, [np.zeros(2, np.float32), x]), 2 * want, rtol=1e-5)


def in_chains(x: np.ndarray[Any, Any], *lengths: int) -> np.ndarray[Any, Any]:
    """Sums of rows in float32, computed level by level in chains of additions of the given lengths."""
    for length in lengths:
        x = np.add.accumulate(x.reshape(x.shape[0], -1, length), axis=2, dtype=np.float32)[:, :, -1]
    return x[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "is_right"), [((1 << 22,), False), ((1 << 11, 1 << 11), False), ((16, 16, 16, 16, 16, 4), True),
                                                   ((64, 64, 64, 16), True)])
def test_a_long_sum_in_one_chain_is_refused(lengths: tuple[int, ...], is_right: bool) -> None:
    """Sums must use chains no longer than `svod.core.ir.summation` says. Only equal inputs show longer ones: with others the roundings of
    the additions cancel in part."""
    k = row_reduce(2, 1 << 22)

    def run(arrays: Arrays) -> None:
        arrays[0][:] = in_chains(arrays[1].reshape(2, -1), *lengths)
    assert Reference(k).sets[-1].name == "equal reals"
    right_or_not, _, reason = check(k, run)
    assert right_or_not is is_right and ("equal reals" in reason) is not is_right, reason


@pytest.mark.parametrize("k", [row_reduce(2, 400), row_reduce(2, 1 << 13, "MUL"), gemm(2, 2, 1 << 13)])
def test_other_kernels_have_no_set_of_equal_values(k: Kernel) -> None:
    assert all(s.name != "equal reals" for s in Reference(k).sets)


@pytest.mark.parametrize("k", [gemm(3, 4, 77), gemm(3, 4, 77, dtypes.float16, dtypes.float32), softmax(3, 50), row_reduce(2, 40, "MUL"),
                               softmax(50, 7, causal=True)])
def test_the_bound_holds_and_is_not_vacuous(k: Kernel) -> None:
    reference = Reference(k)
    reals = next(n for n, s in enumerate(reference.sets) if s.kind == "reals")
    e = reference.expected(reals)[0]
    assert e.tolerance is not None
    dtype = k.params[0].dtype
    want = to_float(e.want, dtype).astype(np.float64)
    single = to_float(evaluate(k.ast, whole(reference.given(reals)), exact=False)[0], dtype)
    assert (np.abs(single - want) <= e.tolerance).all()
    limit = 3e-2 if dtype == dtypes.float16 else 1e-3
    assert np.isfinite(e.tolerance).all() and np.median(e.tolerance[want != 0] / np.abs(want[want != 0])) < limit


@pytest.mark.parametrize("op", sorted(TRANSCENDENTAL, key=lambda op: op.value))
def test_every_function_has_a_bound(op: Ops) -> None:
    """Every function has a finite bound for an argument with an error. With an infinite bound any result would pass."""
    i = axis(0, 8)
    argument = load(param(1, 8), i) * load(param(1, 8), i)
    k = kernel(store(param(0, 8), i, argument.alu(op, *[argument] * (op is Ops.POW)), i))
    bound = bound_of(k, [np.zeros(8, np.float32), np.linspace(0.5, 0.9, 8, dtype=np.float32)])
    assert (bound > 0).all() and (bound < 1e-4).all()


def test_small_integers_are_compared_exactly() -> None:
    assert error_bounds(gemm(3, 4, 4096).ast, 8) == [None]
    assert error_bounds(gemm(3, 4, 1 << 20).ast, 8) != [None]
    assert error_bounds(gemm(3, 4, 64, dtypes.float16, dtypes.float32).ast, 8) != [None]      # 64·64 is more than 2^11
    assert error_bounds(gemm(3, 4, 64, dtypes.float16, dtypes.float32).ast, 4) == [None]
    assert error_bounds(softmax(3, 5).ast, 1) != [None]


def test_a_step_counts_with_its_full_height() -> None:
    """floor(Σx) may be wrong by one if the sum is next to an integer, and only then."""
    y, x = param(0, 2), param(1, 20)
    i, j = axis(0, 2), axis(1, 10)
    a, b = axis(2, 2), axis(3, 10)
    whole = stage(load(x, a * 10 + b), a, b)
    k = kernel(store(y, i, reduce(read(whole, i, j), "ADD", j).alu(Ops.FLOOR), i))
    values = np.full(20, 0.1, np.float32)
    values[10:] = 0.15
    bound = bound_of(k, [np.zeros(2, np.float32), values])
    assert bound[0] == pytest.approx(2.0)
    assert bound[1] < 1e-30


@pytest.mark.parametrize("op", [Ops.LOG, Ops.SQRT])
def test_what_is_not_a_number_has_no_error(op: Ops) -> None:
    """The bound of an element that is NaN is also NaN, and the NaNs of two correct programs may differ in their bits."""
    y, a, b = param(0, 300), param(1, 300), param(2, 300)
    i = axis(0, 300)
    k = kernel(store(y, i, (load(a, i) - load(b, i)).alu(op), i))

    def with_other_bits(arrays: Arrays) -> None:
        right(k)(arrays)
        bits = arrays[0].view(np.uint32)
        bits[np.isnan(arrays[0])] ^= 0x80000001
    ok, _, reason = check(k, with_other_bits)
    assert ok, reason
    ok, _, reason = check(k, after(k, lambda arrays: arrays[0].__setitem__(np.isnan(arrays[0]), 1.0)))
    assert not ok and "instead of nan" in reason


def test_a_branch_that_is_not_a_number_is_no_error_of_the_other() -> None:
    """log(1 + v) by Kahan's formula: if u = 1 + v is 1, the branch that is not taken is 0 · v / 0."""
    y, x = param(0, 200), param(1, 200)
    i = axis(0, 200)
    v = (load(x, i) * 30.0).alu(Ops.EXP)
    u = v + 1.0
    k = kernel(store(y, i, u.alu(Ops.CMPEQ, UOp.const(u.dtype, 1.0)).alu(Ops.WHERE, v, u.alu(Ops.LOG) * v.alu(Ops.FDIV, u - 1.0)), i))
    reals = next(n for n, s in enumerate(Reference(k).sets) if s.kind == "reals")
    expected = Reference(k).expected(reals)[0]
    assert expected.tolerance is not None and (expected.want < 1e-8).any()
    tiny = expected.want < 1e-8
    assert (expected.tolerance[tiny] < 1e-5 * expected.want[tiny] + 1e-30).all()
    ok, _, reason = check(k, after(k, lambda arrays: np.multiply(arrays[0], np.float32(1 + 2e-7), out=arrays[0])))
    assert ok, reason


def test_compare_tells_nan_infinity_and_zero_apart() -> None:
    want = np.array([np.nan, np.inf, 1.0], np.float32)
    assert compare(want.copy(), want, None, dtypes.float32) is None
    for i, value in enumerate([0.0, np.nan, np.inf]):
        got = want.copy()
        got[i] = value
        found = compare(got, want, 1.0, dtypes.float32)
        assert found is not None
        assert found.flat == i


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.int32])
@pytest.mark.parametrize("size", [1, 7, COMPARED_ELEMENTS - 1, 2 * COMPARED_ELEMENTS + 5])
def test_compare_finds_one_wrong_element_in_any_block(dtype: DType, size: int) -> None:
    rng = np.random.default_rng(size)
    want = draw(dtype, size, InputSet("x", "reals", 1.0, 2.0, 0), rng)
    limits = (None, 0.05, rng.uniform(0.04, 0.05, size)) if dtype.is_float else (None,)
    for tolerance in limits:
        near = want.copy() if tolerance is None else from_float(to_float(want, dtype).astype(np.float64) + 0.03, dtype)
        assert compare(near, want, tolerance, dtype) is None
        for flat in {0, size // 2, size - 1}:
            got = near.copy()
            got[flat] = from_float(np.array([3.0]), dtype)[0] if dtype.is_float else want[flat] ^ 1
            found = compare(got, want, tolerance, dtype)
            assert found is not None
            assert (found.wrong, found.flat) == (1, flat)


def test_a_truth_value_is_zero_or_one() -> None:
    want = np.array([True, False])
    got = np.array([0xA5, 0], np.uint8).view(to_numpy(dtypes.bool))
    assert compare(got, want, None, dtypes.bool) is not None
    either = np.full(2, 2.0)        # the bound of a comparison that rounding may decide
    assert compare(np.array([0, 1], np.uint8).view(to_numpy(dtypes.bool)), want, either, dtypes.bool) is None
    assert compare(np.array([2, 1], np.uint8).view(to_numpy(dtypes.bool)), want, either, dtypes.bool) is not None
