"""Programs of library kernels, compared with the NumPy reference: interpreted, in parts with poisoned scratch, and as machine code."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from svod.compile.lower.interpreter import PhaseInterpreter
from svod.compile.lower.intervals import least_iterations
from svod.compile.lower.library import chunks, lower_library_kernel, scan, scatter
from svod.compile.lower.library.chunks import lengths_of
from svod.compile.lower.library.ordering import network, radix, select, sort, sorted_values
from svod.compile.lower.library.ordering.network_sort import SortingWay
from svod.compile.lower.linear import validate
from svod.compile.lower.program import Program
from svod.core.graph import graph
from svod.core.ir.dtype import to_dtype
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import from_float
from svod.tensor import Tensor
from tests.agreement import Case, run_interpreted, run_native
from tests.compile.native import AVX2, AVX512, BASELINE, runnable_targets
from tests.draws import a_half, a_quarter
from tests.interpreted import interpret
from tests.tensor.strategies import make
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY

Array = np.ndarray[Any, np.dtype[Any]]
NATIVE = replace(runnable_targets()["host"], threads=3)
WITHOUT_FLOAT64 = replace(TOY, has_float64=False)
COLUMNS, STRIPS, ROWS, CUT = (2, 7, 19), (2, 5, 211), (3, 37, 1), (1, 71, 1)


def kernel_of(name: str, options: tuple[Any, ...], dtype: str, shapes: list[tuple[int, ...]], types: list[str]) -> Kernel:
    operands = [graph.reshape(graph.buffer(to_dtype(t), math.prod(s)), s) for s, t in zip(shapes, types, strict=True)]
    call, = create_schedule(graph.sink(graph.library_kernel(name, options, to_dtype(dtype), *operands))).calls
    return Kernel(call.ast)


def compare_on_groups(kernel: Kernel, operands: list[Array], target: Target = TOY) -> None:
    case = Case(kernel)
    case.args[1:] = [a.reshape(-1) for a in operands]
    case.want = evaluate(kernel.ast, case.args)
    program = lower_library_kernel(kernel, target)
    validate(program)
    args = case.fresh()
    run_program(program, args)
    case.check(args, "threads of groups")


def case_of(kernel: Kernel, operands: list[Array]) -> Case:
    case = Case(kernel)
    case.args[1:] = [a.reshape(-1) for a in operands]
    case.want = evaluate(kernel.ast, case.args)
    return case


def compare(kernel: Kernel, operands: list[Array], native: bool,
            lower: Callable[[Kernel, Target], Program] = lower_library_kernel) -> None:
    case = case_of(kernel, operands)
    if native:
        run_native(case, lower(kernel, NATIVE), NATIVE, slices=2)
        return
    for target in (NATIVE, BASELINE):
        program = lower(kernel, target)
        validate(program)
        run_interpreted(case, program, slices=2)


def sorting_ways(kernel: Kernel, target: Target) -> list[SortingWay]:
    """The ways in which a kernel that sorts may be written."""
    node = kernel.library_kernel
    assert node is not None
    (name, options, ((_, n),)) = node.arg
    if name == "ARGSORT":
        return sort.ways_to_order(node, target, n, options[0])
    return (sorted_values.ways_to_sort if name == "SORT" else select.ways_to_choose)(node, target)


def without_networks(kernel: Kernel, target: Target) -> Program:
    """The program that sorts rows by counting or by digits."""
    node = kernel.library_kernel
    assert node is not None
    return next(way for way in sorting_ways(kernel, target) if "sort.py" in getattr(way.lower, "func", way.lower).__code__.co_filename
                ).lower(node, target)


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=["avx2", "avx512"])
def test_scans_of_exponentials_use_what_the_target_scales_with(target: Target) -> None:
    program = lower_library_kernel(kernel_of("SCAN", ("LOGADDEXP",), "float32", [COLUMNS], ["float32"]), target)
    assert any(i[0] == "SCALEB" for code in program.code for i in code) is target.has_scaleb


@pytest.mark.parametrize(("combiner", "shape"), a_quarter(product(
    ["ADD", "MUL", "MAX", "MIN", "LOGADDEXP", "ARGMAX", "ARGMIN"], [COLUMNS, STRIPS, ROWS, CUT])), ids=str)
def test_scans(combiner: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if shape == CUT:
        monkeypatch.setattr(scan, "PART_ELEMENTS", 20)      # rows are cut into parts
    if shape == STRIPS:
        monkeypatch.setattr(scan, "MOST_BLOCK", 1)          # carried values are kept in scratch
    position = combiner.startswith("ARG")
    # machine code and integers with some of them
    some = combiner in ("ADD", "LOGADDEXP", "ARGMAX")
    for native, source in ((False, "float32"), *[(True, "float32")] * some, *[(False, "int32")] * (combiner == "ADD")):
        x = make(shape, source, 7, special=combiner in ("MAX", "MIN", "ARGMAX", "ARGMIN", "LOGADDEXP"))
        dtype = "int64" if position or source == "int32" else source
        compare(kernel_of("SCAN", (combiner,), dtype, [shape], [source]), [x], native)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 7, 19), (3, 37, 1), (1, 71, 1), (2, 9, 3), (1, 211, 2), (1, 1, 1), (5, 2, 1), (2, 125, 1)], ids=str)
@pytest.mark.parametrize("combiner", ["ADD", "MUL", "MAX", "MIN", "LOGADDEXP", "ARGMAX", "ARGMIN"])
def test_scans_in_chunks(combiner: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ALONE", 4)
    monkeypatch.setattr(chunks, "LEVEL_POSITIONS", (8, 70))    # one, two and three levels of totals
    position = combiner.startswith("ARG")
    for source in ("float32", "int32")[:1 + (combiner == "ADD")]:
        x = make(shape, source, 7, special=combiner not in ("ADD", "MUL"))
        kernel = kernel_of("SCAN", (combiner,), "int64" if position or source == "int32" else source, [shape], [source])
        for target in (TOY, WITHOUT_FLOAT64):
            compare_on_groups(kernel, [x], target)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "most"), [(TOY, 6.1e-8), (WITHOUT_FLOAT64, 7e-7)], ids=["float64", "blocks"])
@pytest.mark.parametrize(("combiner", "n", "scan_of"), [("ADD", 331, np.cumsum), ("LOGADDEXP", 53, np.logaddexp.accumulate)])
def test_long_scans_round_a_few_times(combiner: str, n: int, scan_of: Any, target: Target, most: float,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A long scan of equal numbers, whose rounding errors all have the same sign, is accurate in one chunk and in several."""
    kernel = kernel_of("SCAN", (combiner,), "float32", [(1, n, 1)], ["float32"])
    x = np.full(n, 0.1, np.float32)
    want = scan_of(x.astype(np.float64))
    for alone in (n, 32):
        monkeypatch.setattr(chunks, "ALONE", alone)
        program = lower_library_kernel(kernel, target)
        got = np.zeros(n, np.float32)
        run_program(program, [got, x])
        assert np.max(np.abs(got - want) / np.abs(want)) <= max(most, 1.3e-7 * (combiner == "LOGADDEXP")), alone


def test_no_thread_of_a_device_takes_a_long_row_alone() -> None:
    for n, columns in ((256, 1), (257, 1), (4096, 1), (4097, 3), (1 << 21, 1), (10 ** 8 + 7, 1), (1000, 70000), (300, 4)):
        lengths, chunk = lengths_of(n, columns)
        assert lengths[0] == n and all(-(-a // chunk) == b for a, b in pairwise(lengths)) and lengths[-1] <= chunk
        assert (chunk <= 256 or columns >= 1 << 16) and len(lengths) <= 4, (n, chunk)
    program = lower_library_kernel(kernel_of("SCAN", ("ADD",), "float32", [(2, 5000, 5)], ["float32"]), TOY)
    assert [p.scratch_bytes for p in program.spec.phases] == [0] * 5 and program.spec.phases[0].extent == -(-2 * 278 * 5 // 64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_in_float32(dtype: str) -> None:
    ones = from_float(np.ones((1, 5000, 1), np.float32), to_dtype(dtype))
    compare(kernel_of("SCAN", ("ADD",), dtype, [(1, 5000, 1)], [dtype]), [ones], True)   # 16 bits by themselves end at 2048 and 256


@pytest.mark.parametrize("source", ["bool", "float64"])
def test_elements_are_converted_as_they_are_loaded(source: str) -> None:
    compare(kernel_of("SCAN", ("ADD",), "int32", [ROWS], [source]), [make(ROWS, source, 0)], True)


def elements_to_sort(shape: tuple[int, int], dtype: str, seed: int) -> Array:
    """Elements with NaN, infinities, both zeros and equal ones; integers of the whole range of their type beside small ones."""
    x = make(shape, dtype, seed, special=True)
    if x.dtype.kind in "iu":
        wide = np.random.default_rng(seed).integers(np.iinfo(x.dtype).min, np.iinfo(x.dtype).max, shape, x.dtype, endpoint=True)
        x = np.where(np.arange(shape[1]) % 3 == 0, wide, x)
    return from_float(x, to_dtype(dtype)) if dtype == "bfloat16" else x


# the way of sorting → its shapes, and the limits that choose it
WAYS_TO_SORT: dict[str, tuple[list[tuple[int, int]], dict[str, int]]] = {
    "counting": ([(1, 1), (2, 37), (3, 61)], {}), "rows": ([(19, 1), (18, 7), (33, 13)], {}),
    "radix": ([(3, 17), (2, 18), (1, 67)], {"COUNTED_PER_DIGIT": 0}),
    "parts": ([(1, 71), (2, 50)], {"COUNTED_PER_DIGIT": 0, "LEAST_SORTED_PART": 20})}


@pytest.mark.parametrize(("way", "dtype", "native"), a_quarter(
    [*product(WAYS_TO_SORT, ["float32", "float16", "bfloat16", "float64", "int8", "int64", "uint64", "bool"], [False, True])]), ids=str)
def test_sorting(way: str, dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, limits = WAYS_TO_SORT[way]
    for name, limit in limits.items():
        monkeypatch.setattr(sort, name, limit)
    monkeypatch.setattr(select, "SHORT_ROW", 1 << 20)        # TOPK sorts as well
    made = spied(monkeypatch, (radix.Radix, "fill"), (sort, "count_rows"), (sort, "order_by_counting"))
    for number, (shape, descending) in enumerate(product(shapes[:2] if not native else shapes, [False, True])):
        x = elements_to_sort(shape, dtype, number)
        x[-1] = np.where(np.arange(shape[1]) == 2, x[-1], x[-1, 0])      # all elements but one are equal
        k = 1 + shape[1] // 3
        for name, options in (("ARGSORT", (descending,)), ("TOPK", (k, not descending))):
            kernel = kernel_of(name, options, "int64", [shape], [dtype])
            compare(kernel, [x], native, without_networks)
            made.clear()
            phases = without_networks(kernel, NATIVE).spec.phases
            assert (len(phases) > 1) == (way == "parts"), f"{way} has {len(phases)} phases"
            assert made and ("fill" in made) == (way in ("radix", "parts")), f"{way} is written by {made}"


@pytest.mark.parametrize(("dtype", "machine"), a_quarter([*product(
    ["float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint64", "bool"], ["", "baseline", "avx2", "host"])]), ids=str)
def test_every_way_to_sort(dtype: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`machine`: which target's machine code runs; "": the programs are interpreted."""
    for module in (sort, sorted_values):
        monkeypatch.setattr(module, "LEAST_SORTED_PART", 20)
    shapes = [(1, 1), (2, 2), (33, 13), (17, 331), (1, 1543)] if machine else [(1, 1), (3, 2), (18, 7), (2, 37)]
    target = replace(runnable_targets().get(machine, NATIVE), threads=3, l1=2048)       # blocks that fit the first cache are small
    for number, (shape, name) in enumerate(product(shapes, ["SORT", "ARGSORT", "TOPK"])):
        x = elements_to_sort(shape, dtype, number)
        x[-1] = np.where(np.arange(shape[1]) == 2, x[-1], x[-1, 0])      # all elements but one are equal
        options = (1 + shape[1] // 150, bool(number & 1)) if name == "TOPK" else (bool(number & 1),)
        kernel = kernel_of(name, options, dtype if name == "SORT" else "int64", [shape], [dtype])
        case = case_of(kernel, [x])
        assert kernel.library_kernel is not None
        for way in sorting_ways(kernel, target):
            program = way.lower(kernel.library_kernel, target)
            if machine:
                run_native(case, program, target, slices=2)
            else:
                validate(program)
                run_interpreted(case, program, slices=2)


def test_networks_order_zeros_and_ones() -> None:
    """By the zero-one principle networks that sort all of these sort everything."""
    for n in range(1, 17):
        values = [np.arange(1 << n) >> i & 1 for i in range(n)]
        for i, j in network.sorting_pairs(n):
            values[i], values[j] = np.minimum(values[i], values[j]), np.maximum(values[i], values[j])
        assert all((a <= b).all() for a, b in pairwise(values)), n


def test_rows_are_sorted_in_the_way_of_least_cost() -> None:
    """Networks sort what fits the caches, digits long rows of few digits, and columns need as many rows as a vector has lanes."""
    target = replace(AVX512, threads=2, l1=1 << 15, l2=1 << 20)
    for name, options, dtype, shape, chosen in (
            ("SORT", (False,), "float32", (1024, 1000), "sort_columns"), ("SORT", (False,), "float64", (100000, 16), "sort_columns"),
            ("SORT", (False,), "int32", (1, 1 << 20), "sort_blocks"), ("SORT", (False,), "float32", (8, 1000), "sort_blocks"),
            ("SORT", (False,), "uint8", (1, 1 << 20), "_by_parts"), ("SORT", (False,), "int8", (64, 1 << 16), "_by_rows"),
            ("SORT", (False,), "int64", (1, 3), "_by_counting"), ("ARGSORT", (False,), "int32", (1024, 1000), "sort_columns"),
            ("ARGSORT", (True,), "float64", (1, 1 << 20), "_order_by_parts"), ("ARGSORT", (False,), "int8", (64, 1 << 15), "_order_rows"),
            ("TOPK", (5, True), "float32", (4096, 1000), "insert_best"), ("TOPK", (50, True), "float32", (32, 50257), "select_best"),
            ("TOPK", (100, True), "float32", (4096, 1000), "sort_columns")):
        kernel = kernel_of(name, options, dtype if name == "SORT" else "int64", [shape], [dtype])
        lower: Any = min(sorting_ways(kernel, target), key=lambda way: way.cycles).lower
        assert getattr(lower, "func", lower).__name__ == chosen, (name, dtype, shape)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "uint8"])
def test_sorted_values_of_long_rows(dtype: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of wide digits, of which the first, the last or those between have no difference, or all."""
    monkeypatch.setattr(sorted_values, "LEAST_LONG_ROW", 1)
    monkeypatch.setattr(sort, "COUNTED_PER_DIGIT", 0)
    target = replace(NATIVE, threads=parts)
    monkeypatch.setattr(sorted_values, "LEAST_SORTED_PART", 20)
    rng, kind = np.random.default_rng(parts), to_dtype(dtype)
    for step in (0, 1, 1 << 11, 1 << 22, 1 << 27):
        x = rng.integers(0, 5, (1, 71)) * step % (1 << min(30, kind.bits - 1))
        x = from_float(x.astype(np.float32), kind) if dtype == "bfloat16" else x.astype(dtype)
        kernel = kernel_of("SORT", (bool(step & 1),), dtype, [x.shape], [dtype])
        assert kernel.library_kernel is not None
        by_digits, *_ = sorting_ways(kernel, target)
        program = by_digits.lower(kernel.library_kernel, target)
        assert (len(program.spec.phases) > 1) == (parts > 1)
        case = Case(kernel)
        case.args[1:], case.want = [x.reshape(-1)], evaluate(kernel.ast, [np.zeros_like(x).reshape(-1), x.reshape(-1)])
        run_native(case, program, target, 1)


def test_zeros_are_in_the_order_of_their_signs() -> None:
    for n in (3, 60):       # a short row is sorted by counting, a long one by digits
        x = np.array([[0.0, -0.0, 1.0, 0.0, -0.0, -1.0] * n], np.float32)
        found = Tensor(x).sort(1).values.numpy()[0, n:5 * n]
        assert np.signbit(found[:2 * n]).all() and not np.signbit(found[2 * n:]).any()


def spied(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> list[str]:
    """A list that gets the name of each of these functions, (module or class, name), when it is called."""
    called: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            called.append(name)
            return real(*args, **options)
        monkeypatch.setattr(owner, name, call)
    for owner, name in functions:
        watch(owner, name)
    return called


@pytest.mark.parametrize("low", [-3, 2 ** 40], ids=str)
def test_digits_without_difference_have_no_pass(low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of 64 bits that differ in no digit, one or five, and in the high word alone."""
    monkeypatch.setattr(sort, "COUNTED_PER_DIGIT", 0)
    stored = []
    for step in (0, 1, 7 * 10 ** 9, 1 << 32):
        x = (low + step * np.random.default_rng(0).integers(0, 9, (2, 41))).astype(np.int64)
        kernel = kernel_of("ARGSORT", (False,), "int64", [x.shape], ["int64"])
        compare(kernel, [x], True, without_networks)
        stored.append(0)

        def touched(self: PhaseInterpreter, i: int, memory: Any, where: Array, write: bool) -> None:
            stored[-1] += write * where.size
        with monkeypatch.context() as watching:
            watching.setattr(PhaseInterpreter, "watched", True)
            watching.setattr(PhaseInterpreter, "touched", touched)
            interpret(without_networks(kernel, NATIVE), [np.zeros(x.size, np.int64), x.reshape(-1)])
    none, one, five, high = stored
    assert none < one < five and one <= high < five, f"elements that are stored: {stored}"


@pytest.mark.parametrize(("dtype", "native"), a_half([*product(["float32", "bfloat16", "int64", "uint8"], [False, True])]), ids=str)
def test_selection(dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TOPK that keeps candidates: rows that grow, fall, or repeat some values, and candidates sorted in either way."""
    for name, limit in (("SHORT_ROW", 1), ("LEAST_CAPACITY", 5), ("BLOCK_VECTORS", 2)):
        monkeypatch.setattr(select, name, limit)
    n = 700 if native else 331
    x = np.stack([elements_to_sort((1, n), dtype, 3)[0], *elements_to_sort((2, n), dtype, 4)])
    if dtype != "bfloat16":
        x[1:] = np.sort(x[1:], -1)
        x[2] = x[2, ::-1]
    for k, limit in ((1, 64), (5, 0), (n // 9, 64)):
        monkeypatch.setattr(sort, "COUNTED_PER_DIGIT", limit)
        for largest in (False, True):
            compare(kernel_of("TOPK", (k, largest), "int64", [x.shape], [dtype]), [x], native, by_selection)


def by_selection(kernel: Kernel, target: Target) -> Program:
    """The program that keeps candidates."""
    assert kernel.library_kernel is not None
    return select.select_best(kernel.library_kernel, target)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint64", "bool"])
def test_sorting_on_groups(dtype: str) -> None:
    for shape in ((3, 11), (1, 1)):
        x = elements_to_sort(shape, dtype, 3)
        for descending in (False, True):
            kernels = [kernel_of("SORT", (descending,), dtype, [shape], [dtype]),
                       kernel_of("ARGSORT", (descending,), "int64", [shape], [dtype]),
                       *[kernel_of("TOPK", (k, descending), "int64", [shape], [dtype]) for k in {min(3, shape[1]), shape[1]}]]
            for kernel in kernels:
                compare_on_groups(kernel, [x])


@pytest.mark.parametrize("name", ["SORT", "ARGSORT", "TOPK"])
def test_threads_of_a_device_keep_no_row_to_themselves(name: str) -> None:
    options = (100, True) if name == "TOPK" else (True,)
    program = lower_library_kernel(kernel_of(name, options, "float32" if name == "SORT" else "int64", [(3, 70000)], ["float32"]), TOY)
    phase = program.spec.phases[-1]
    assert len(program.spec.phases) == 18 and {p.scratch_bytes for p in program.spec.phases} == {0}
    assert phase.extent * phase.block >= 3 * 70000 and least_iterations(phase, program.code[-1]) < 20


@pytest.mark.parametrize("shape", [(1, 5, 11, 1), (1, 3, 5, 67)], ids=str)
@pytest.mark.parametrize("reduction", ["SET", "ADD", "MUL", "MAX", "MIN"])
def test_scatter(reduction: str, shape: tuple[int, ...]) -> None:
    outer, n, m, inner = shape
    for native, kind in ((reduction == "ADD", "float32"), (False, "int32")):
        compare_scatter(reduction, kind, (outer, n, inner), (outer, m, inner), (outer, m, inner), native)


def compare_scatter(reduction: str, kind: str, base: tuple[int, ...], places: tuple[int, ...], values: tuple[int, ...],
                    native: bool) -> None:
    n = base[1]
    index = np.random.default_rng(5).integers(-n - 2, n + 2, places).astype(np.int32)     # some outside: left out
    kernel = kernel_of("SCATTER", (reduction,), kind, [base, places, values], [kind, "int32", kind])
    compare(kernel, [make(base, kind, 1), index, make(values, kind, 2)], native)


@pytest.mark.parametrize(("reduction", "native"), a_half(product(["SET", "ADD", "MUL", "MAX"], [False, True])), ids=str)
def test_scatter_of_repeated_positions_and_values(reduction: str, native: bool) -> None:
    for inner in (1, 37, 300):      # columns by vectors, and in several blocks
        for places, values in (((1, 7, 1), (2, 7, inner)), ((2, 1, inner), (1, 7, 1)), ((2, 7, 1), (1, 1, 1))):
            compare_scatter(reduction, "float32", (2, 5, inner), places, values, native)


@pytest.mark.parametrize("native", [False, True])
def test_scatter_into_a_base_that_is_copied_before(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "PARALLEL_ELEMENTS", 50)
    for base, values in (((1, 60, 1), (1, 9, 1)), ((2, 5, 37), (2, 4, 37)), ((1, 7, 300), (1, 5, 300))):
        for places in (values, (*values[:2], 1)):
            compare_scatter("ADD", "float32", base, places, values, native)
            kernel = kernel_of("SCATTER", ("ADD",), "float32", [base, places, values], ["float32", "int32", "float32"])
            assert len(lower_library_kernel(kernel, replace(NATIVE, threads=4)).spec.phases) == 2


@pytest.mark.parametrize(("places", "columns", "by_values", "by_rows"), [
    (60, 1, 1, 1), (60, 86, 1, 1), (60, 641, 5, 4), (60, 1024, 8, 4), (60, 1025, 8, 4), (1 << 17, 64, 2, 2), (1 << 17, 86, 2, 2)])
def test_columns_are_cut_into_blocks_that_fill_cores(places: int, columns: int, by_values: int, by_rows: int) -> None:
    """Narrow blocks of few places are slower, as cores share their lines."""
    for blocks, width in ((by_values, columns), (by_rows, 1)):
        kernel = kernel_of("SCATTER", ("ADD",), "float32", [(1, places, columns), (1, 40, width), (1, 40, columns)],
                           ["float32", "int32", "float32"])
        phase = lower_library_kernel(kernel, replace(NATIVE, threads=4, l2=1 << 21)).spec.phases[-1]
        assert phase.extent == (1 if columns == 1 else blocks)


@pytest.mark.parametrize(("reduction", "kind"), [("ADD", "float32"), ("ADD", "int64"), ("MUL", "float32"), ("MIN", "uint8")])
def test_scatter_of_many_values_by_parts(reduction: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "LEAST_SCATTERED_PART", 5)
    monkeypatch.setattr(scatter, "PARALLEL_ELEMENTS", 50)       # several chunks of tables
    for places, index, values in (((1, 3, 1), (1, 61, 1), (1, 61, 1)), ((1, 2, 9), (1, 61, 1), (1, 61, 9)),
                                  ((1, 3, 59), (1, 61, 59), (1, 61, 59)), ((2, 3, 5), (2, 61, 5), (2, 61, 5))):
        kernel = kernel_of("SCATTER", (reduction,), kind, [places, index, values], [kind, "int32", kind])
        for threads in (2, 4, 5):
            program = lower_library_kernel(kernel, replace(NATIVE, threads=threads))
            assert len(program.spec.phases) == 1 + (threads >= 2 * places[0])
        for native in (False, True):
            compare_scatter(reduction, kind, places, index, values, native)


def test_parts_of_columns_need_cores_that_columns_leave_idle() -> None:
    for threads, columns, has_tables in ((2, 100, True), (2, 1024, False), (16, 1024, True), (16, 1 << 14, False)):
        shapes: list[tuple[int, ...]] = [(1, 3, columns), (1, 1000, columns), (1, 1000, columns)]
        kernel = kernel_of("SCATTER", ("ADD",), "float32", shapes, ["float32", "int32", "float32"])
        assert bool(lower_library_kernel(kernel, replace(NATIVE, threads=threads)).spec.temps) == has_tables
