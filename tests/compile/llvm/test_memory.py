"""Machine code of memory instructions, loops and complete phases, compared with NumPy. Every array is between guard elements that must not
change, and masked lanes point outside mapped memory."""
from __future__ import annotations

import ctypes
import itertools
import mmap
from typing import Any

import numpy as np
import pytest

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.elf import undefined_symbols
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.linear import ARITY, LEGAL_INTEGER
from svod.core.ir.dtype import STORABLE, DType, dtypes, to_numpy
from svod.core.machine.target import Target
from svod.errors import CompileError
from tests.compile.native import AVX2, AVX512, BASELINE, BOOL, INDEX, TARGETS, Code, aligned, program, run, runnable_targets
from tests.draws import a_half, a_quarter

F32, HOST = dtypes.float32, host_target()
NAMES = {t: n for n, t in runnable_targets().items()}
OF_EACH = pytest.mark.parametrize(("dtype", "target"), a_quarter(itertools.product(STORABLE, NAMES)), ids=lambda v: NAMES.get(v) or str(v))


def values(dtype: DType, n: int, seed: int = 1) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 2 if dtype.kind == "b" else 100, n)
    return raw.astype(np.float32).view(np.uint32).astype(np.uint16) if dtype == dtypes.bfloat16 else raw.astype(to_numpy(dtype))


def at_end_of_page(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy x to the end of a readable page, so that reading one element more faults."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    region = mmap.mmap(-1, size + page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(page), 0) == 0
    out = np.frombuffer(region, x.dtype, len(x), offset=size - x.nbytes)
    out[:] = x
    return out


@pytest.mark.parametrize("dtype", a_half(STORABLE), ids=str)
def test_contiguous(dtype: DType) -> None:
    for lanes in (1, 3, 4, 8, 16, 32):
        x = values(dtype, lanes + 7)
        out = np.full(lanes + 7, 1, x.dtype)
        code = Code()
        o, a, i = code.arg(0, dtype), code.arg(1, dtype), code.index(2)
        code.store(o, i, code.load(a, i, lanes, offset=3), offset=1)
        run(code, [out, x])
        want = np.full(lanes + 7, 1, x.dtype)
        want[3:3 + lanes] = x[5:5 + lanes]
        np.testing.assert_array_equal(out, want)


@OF_EACH
def test_strided_loads_stay_inside(dtype: DType, target: Target) -> None:
    for stride in (1, -1, 0, 2, -2, 3, 4, -5, 6, -7, 17):
        check_strided_loads(dtype, stride, target)


def check_strided_loads(dtype: DType, stride: int, target: Target) -> None:
    for lanes in (1, 4, 16) if target == HOST else (8,):
        span = (lanes - 1) * abs(stride) + 1
        x = at_end_of_page(values(dtype, span))
        first = 0 if stride >= 0 else span - 1
        code = Code()
        o, a, i = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
        code.store(o, i, code.put("LOADS", dtype, lanes, (a, i), (first, stride)))
        out = np.zeros(lanes, x.dtype)
        run(code, [out, x], target=target)
        np.testing.assert_array_equal(out, x[first + stride * np.arange(lanes)])


@OF_EACH
def test_masked_strided_loads_touch_no_other_element(dtype: DType, target: Target) -> None:
    """The lanes at the far end are masked and point outside readable memory, with constant and computed masks."""
    for stride in (2, -3, 6):
        check_masked_strided_loads(dtype, stride, target)


def check_masked_strided_loads(dtype: DType, stride: int, target: Target) -> None:
    for lanes, active in ((5, 3), (12, 7), (16, 12), (16, 1), (32, 29)) if target == HOST else ((8, 5),):
        span = (active - 1) * abs(stride) + 1
        x = at_end_of_page(values(dtype, span))
        last = lanes - active if stride < 0 else 0          # lanes before the first that counts lie behind the memory
        first = 0 if stride >= 0 else span - 1 + last * -stride
        on = tuple(k >= last if stride < 0 else k < active for k in range(lanes))
        for constant in (True, False):
            code = Code()
            o, a, i = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
            flags = code.arg(2, dtypes.bool)
            mask = code.put("VCONST", dtypes.bool, lanes, (), on) if constant else code.load(flags, i, lanes)
            other = code.put("CONST", dtype, lanes, (), 0)
            code.store(o, i, code.put("LOADS", dtype, lanes, (a, i, mask, other), (first, stride)))
            out = np.zeros(lanes, x.dtype)
            run(code, [out, x, np.array(on)], target=target)
            at = first + stride * np.arange(lanes)
            np.testing.assert_array_equal(out, np.where(on, x[np.clip(at, 0, span - 1)], np.zeros(1, x.dtype)))


@pytest.mark.parametrize("dtype", a_half(STORABLE), ids=str)
def test_strided_stores(dtype: DType) -> None:
    for stride in (1, -1, 2, -3, 7):
        check_strided_stores(dtype, stride)


def check_strided_stores(dtype: DType, stride: int) -> None:
    for lanes in (1, 4, 16):
        span = (lanes - 1) * abs(stride) + 1
        first = 0 if stride >= 0 else span - 1
        x = values(dtype, lanes)
        out = np.full(span + 4, 1, x.dtype)
        want = out.copy()
        want[2 + first + stride * np.arange(lanes)] = x
        code = Code()
        o, a, i = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
        code.put("STORES", dtype, 1, (o, i, code.load(a, i, lanes)), (2 + first, stride))
        run(code, [out, x])
        np.testing.assert_array_equal(out, want)


def lane_mask(code: Code, pointer: int, lanes: int) -> int:
    return code.load(pointer, code.index(0), lanes)


@OF_EACH
def test_masked_loads(dtype: DType, target: Target) -> None:
    """Masked lanes point beyond readable memory."""
    for op, lanes in itertools.product(("LOAD", "LOADS", "GATHER"), (8, 16) if target == HOST else (8,)):
        for stride, on in itertools.product((1, -1, 0, 3) if op == "LOADS" else (1,), (lanes // 2 - 1, 0)):
            mask = np.arange(lanes) < on if stride >= 0 else np.arange(lanes) >= lanes - on
            x = at_end_of_page(values(dtype, (on - 1) * abs(stride) + 1 if on else 0))
            first = 0 if stride >= 0 else lanes - 1
            position = first + stride * np.arange(lanes)
            code = Code()
            o, a, m = code.arg(0, dtype), code.arg(1, dtype), lane_mask(code, code.arg(2, BOOL), lanes)
            zero, alt = code.put("BEGIN", INDEX, 1), code.const(dtype, 1, lanes)
            if op == "GATHER":
                idx = code.load(code.arg(3, dtypes.int32), zero, lanes)
                value = code.put(op, dtype, lanes, (a, idx, m, alt), 0)
            else:
                value = code.put(op, dtype, lanes, (a, zero, m, alt), 0 if op == "LOAD" else (first, stride))
            code.store(o, zero, value)
            out = np.zeros(lanes, x.dtype)
            run(code, [out, x, mask, position.astype(np.int32)], target=target)
            one = 0x3F80 if dtype == dtypes.bfloat16 else 1
            want = np.full(lanes, one, x.dtype)
            want[mask] = x[position[mask]]
            np.testing.assert_array_equal(out, want)


@OF_EACH
def test_masked_stores(dtype: DType, target: Target) -> None:
    for op, lanes in itertools.product(("STORE", "STORES", "SCATTER"), (8, 16) if target == HOST else (8,)):
        for stride in (1, -1, 3) if op == "STORES" else (1,):
            on = lanes // 2 - 1
            mask = np.arange(lanes) < on if stride > 0 else np.arange(lanes) >= lanes - on
            out = at_end_of_page(np.zeros((on - 1) * abs(stride) + 1, to_numpy(dtype)))
            x = values(dtype, lanes)
            first = 0 if stride > 0 else lanes - 1
            position = first + stride * np.arange(lanes)
            code = Code()
            o, a, m = code.arg(0, dtype), code.arg(1, dtype), lane_mask(code, code.arg(2, BOOL), lanes)
            zero = code.put("BEGIN", INDEX, 1)
            value = code.load(a, zero, lanes)
            if op == "SCATTER":
                idx = code.load(code.arg(3, dtypes.int64), zero, lanes)
                code.put(op, dtype, 1, (o, idx, value, m), 0)
            else:
                code.put(op, dtype, 1, (o, zero, value, m), (0, False) if op == "STORE" else (first, stride))
            run(code, [out, x, mask, position], target=target)
            want = np.zeros_like(out)
            want[position[mask]] = x[mask]
            np.testing.assert_array_equal(out, want)


@OF_EACH
@pytest.mark.parametrize("lanes", a_half([3, 16]))
def test_one_mask_for_all_lanes_chooses_the_address(lanes: int, dtype: DType, target: Target) -> None:
    """One mask for all lanes selects between the address and a slot with the alternative. No masked load is used, which is slow on an
    unmapped page."""
    for on, reverse in itertools.product((False, True), (False, True)):
        code = Code()
        o, a, zero = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
        m = code.put("SPLAT", BOOL, lanes, (code.alu("CMPLT", code.put("VAR", INDEX, 1, (), "k"), code.index(5)),))
        src = (a, zero, m, code.const(dtype, 1, lanes))
        value = code.put("LOADS", dtype, lanes, src, (lanes - 1, -1)) if reverse else code.put("LOAD", dtype, lanes, src, 0)
        code.store(o, zero, value)
        x = at_end_of_page(values(dtype, lanes if on else 0))
        out = np.zeros(lanes, x.dtype)
        assert "llvm.masked" not in render(program(code, [out, x], ("k",)), target)
        run(code, [out, x], variables={"k": 0 if on else 9}, target=target)
        one = 0x3F80 if dtype == dtypes.bfloat16 else 1
        np.testing.assert_array_equal(out, (x[::-1] if reverse else x) if on else np.full(lanes, one, x.dtype))


@OF_EACH
@pytest.mark.parametrize("stride", [1, -1, 2, -3])
def test_conjunctions_of_scalars_and_lanes_touch_no_other_element(stride: int, dtype: DType, target: Target) -> None:
    """Loads near and far from each other, under conjunctions of scalars with constant and with computed lanes. Masked lanes point outside
    readable memory, and so does every lane if a scalar is false."""
    rng = np.random.default_rng(abs(stride))
    for lanes, scalars in itertools.product((5, 16) if target == HOST else (8,), (1, 2)):
        lasting = lanes - rng.integers(0, lanes)
        patterns = [np.ones(lanes, bool), np.arange(lanes) < lasting, (np.arange(lanes) < lasting) & (rng.random(lanes) < 0.6)]
        patterns = [p if stride > 0 else p[::-1] for p in patterns]
        cases = list(itertools.product((0, 7, 40, 45, 700), range(len(patterns)), (False, True)))
        first = [start if stride > 0 else start + (lanes - 1) * -stride for start, _, _ in cases]
        at = np.concatenate([k + stride * np.arange(lanes) for k in first])
        for on in (True, False):
            code = Code()
            o, a, flags, zero = code.arg(0, dtype), code.arg(1, dtype), code.arg(2, BOOL), code.put("BEGIN", INDEX, 1)
            known = [code.alu("CMPLT", code.put("VAR", INDEX, 1, (), name), code.index(5)) for name in "jk"]
            alt = code.const(dtype, 1, lanes)
            for number, (_, pattern, is_computed) in enumerate(cases):
                mask = (code.load(flags, zero, lanes, offset=pattern * lanes) if is_computed
                        else code.put("VCONST", BOOL, lanes, (), tuple(map(bool, patterns[pattern]))))
                for scalar in known[:scalars]:
                    mask = code.alu("AND", code.put("SPLAT", BOOL, lanes, (scalar,)), mask)
                value = code.put("LOADS", dtype, lanes, (a, zero, mask, alt), (first[number], stride))
                code.store(o, zero, value, offset=lanes * number)
            held = np.concatenate([patterns[pattern] & on for _, pattern, _ in cases])
            x = at_end_of_page(values(dtype, int(at[held].max()) + 1 if on else 0))
            out = np.zeros(len(at), x.dtype)
            variables = {"j": 0, "k": 0} if on else {"j": 0 if scalars == 2 else 9, "k": 9}
            run(code, [out, x, np.concatenate(patterns)], variables=variables, target=target)
            expected = np.full(len(at), 0x3F80 if dtype == dtypes.bfloat16 else 1, x.dtype)
            expected[held] = x[at[held]]
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("scalars", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_near_loads_under_one_mask_share_the_choice_of_an_address(stride: int, scalars: int) -> None:
    code = Code()
    o, a, zero = code.arg(0, F32), code.arg(1, F32), code.put("BEGIN", INDEX, 1)
    mask = code.put("VCONST", BOOL, 8, (), (True,) * 7 + (False,))
    for name in "jk"[:scalars]:
        below = code.alu("CMPLT", code.put("VAR", INDEX, 1, (), name), code.index(5))
        mask = code.alu("AND", code.put("SPLAT", BOOL, 8, (below,)), mask)
    for number in range(6):
        value = code.put("LOADS", F32, 8, (a, zero, mask, code.const(F32, 0.0, 8)), (number, stride))
        code.store(o, zero, value, offset=8 * number)
    text = render(program(code, [np.zeros(48, np.float32), np.zeros(48, np.float32)], ("j", "k")), AVX2)
    assert text.count("select i1") == 1 and text.count(" = and ") <= scalars - 1 + scalars


@TARGETS
@pytest.mark.parametrize("lanes", a_half([1, 16]))
@pytest.mark.parametrize("on", [False, True])
def test_scalar_masks(lanes: int, on: bool, target: Target) -> None:
    """With a false scalar mask no form of access touches memory: the pointers are to the end of readable memory."""
    x = np.arange(lanes * 3, dtype=np.float32) + 1
    out = np.zeros(lanes * 3, np.float32)
    dtype = F32
    for form in ("LOAD", "LOADS", "LOADS-", "LOADS0", "GATHER"):
        code = Code()
        o, a, zero = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
        m = code.alu("CMPLT", code.put("VAR", INDEX, 1, (), "k"), code.index(5))
        alt = code.const(dtype, 7.0, lanes)
        stride = {"LOADS": 3, "LOADS-": -1, "LOADS0": 0}.get(form, 1)
        first = lanes - 1 if stride < 0 else 0
        if form == "GATHER":
            idx = code.put("VCONST", INDEX, lanes, (), tuple(range(lanes)))
            v = code.put("GATHER", dtype, lanes, (a, idx, m, alt), 0)
        else:
            v = code.put(form.strip("-0"), dtype, lanes, (a, zero, m, alt), 0 if form == "LOAD" else (first, stride))
        code.store(o, zero, v)
        source = x if on else at_end_of_page(np.zeros(0, np.float32))
        run(code, [out, source], variables={"k": 0 if on else 9}, target=target)
        want = x[first + stride * np.arange(lanes)] if on else np.full(lanes, 7, np.float32)
        np.testing.assert_array_equal(out[:lanes], want)
        code = Code()
        o, a, zero = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
        m = code.alu("CMPLT", code.put("VAR", INDEX, 1, (), "k"), code.index(5))
        v = code.load(a, zero, lanes)
        if form == "GATHER":
            code.put("SCATTER", dtype, 1, (o, code.put("VCONST", INDEX, lanes, (), tuple(range(lanes))), v, m), 0)
        elif form == "LOAD":
            code.store(o, zero, v, mask=(m,))
        else:
            code.put("STORES", dtype, 1, (o, zero, v, m), (first, stride))
        out[:] = 0
        run(code, [out if on else at_end_of_page(out[:0]), x], variables={"k": 0 if on else 9}, target=target)
        want = np.zeros_like(out)
        if on:
            want[first + stride * np.arange(lanes)] = x[:lanes]
        np.testing.assert_array_equal(out, want)


@OF_EACH
@pytest.mark.parametrize("of", [dtypes.index, dtypes.int32, dtypes.uint16])
def test_gather_and_scatter(dtype: DType, of: DType, target: Target) -> None:
    lanes = 16
    order = np.random.default_rng(3).permutation(lanes).astype(to_numpy(of))
    x, out = values(dtype, lanes + 2), np.zeros(lanes + 1, to_numpy(dtype))
    code = Code()
    o, a, zero = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
    idx = code.put("LOAD", of, lanes, (code.arg(2, of), zero), 0)
    v = code.put("GATHER", dtype, lanes, (a, idx), 2)
    code.put("SCATTER", dtype, 1, (o, idx, v), 1)
    run(code, [out, x, order], target=target)
    want = np.zeros_like(out)
    want[1 + order.astype(int)] = x[2 + order.astype(int)]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_lanes(dtype: DType) -> None:
    """SPLAT, EXTRACT, VCONST and SHUFFLE give the right lanes."""
    x = values(dtype, 8)
    out = np.zeros(32, x.dtype)
    code = Code()
    o, a, zero = code.arg(0, dtype), code.arg(1, dtype), code.put("BEGIN", INDEX, 1)
    low, high = code.load(a, zero, 4), code.load(a, zero, 4, offset=4)
    code.store(o, zero, code.put("SHUFFLE", dtype, 8, (low, high), (7, 0, 6, 1, 5, 2, 4, 3)))
    code.store(o, zero, code.put("SHUFFLE", dtype, 2, (low, low), (3, 6)), offset=8)
    one = code.put("EXTRACT", dtype, 1, (high,), 2)
    code.store(o, zero, code.put("SPLAT", dtype, 4, (one,)), offset=10)
    code.store(o, zero, code.put("SHUFFLE", dtype, 2, (one, code.load(a, zero, 1)), (1, 0)), offset=14)
    code.store(o, zero, code.put("SHUFFLE", dtype, 1, (low, high), (5,)), offset=16)
    code.store(o, zero, code.put("VCONST", dtype, 4, (), (1, 0, 1, 1)), offset=17)
    code.store(o, zero, code.put("SPLAT", dtype, 3, (code.const(dtype, 1),)), offset=21)
    run(code, [out, x])
    unit = 0x3F80 if dtype == dtypes.bfloat16 else 1
    want = [*x[[7, 0, 6, 1, 5, 2, 4, 3]], x[3], x[2], *[x[6]] * 4, x[0], x[6], x[5], unit, 0, unit, unit, *[unit] * 3]
    np.testing.assert_array_equal(out[:24], np.array(want, x.dtype))


# -- loops ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("start, stop, step", [(0, 0, 1), (5, 2, 1), (0, 1, 1), (3, 4, 7), (0, 10, 3), (2, 11, 3), (0, 64, 16)])
@pytest.mark.parametrize("constant", ["both", "none", "start"])
def test_loops_run_as_range_does(start: int, stop: int, step: int, constant: str, final: bool) -> None:
    code = Code()
    o, zero = code.arg(0, dtypes.int64), code.index(0)
    first = code.index(start) if constant != "none" else code.put("VAR", INDEX, 1, (), "start")
    last = code.index(stop) if constant == "both" else code.put("VAR", INDEX, 1, (), "stop")
    count, total = code.const(dtypes.int64, 0), code.const(dtypes.int64, 1000)
    loop = code.loop(first, last, step, count, total)
    n, s = code.carry(loop, 0), code.carry(loop, 1)
    following = code.alu("ADD", s, code.put("CAST", dtypes.int64, 1, (loop,)))
    code.end(loop, code.alu("ADD", n, code.const(dtypes.int64, 1)), following)
    code.store(o, zero, code.result(loop, 0))
    code.store(o, zero, code.result(loop, 1), offset=1)
    out = np.zeros(2, np.int64)
    run(code, [out], variables={"start": start, "stop": stop}, final=final)
    np.testing.assert_array_equal(out, [len(range(start, stop, step)), 1000 + sum(range(start, stop, step))])


@pytest.mark.parametrize("final", [False, True])
def test_nested_loops_swap_their_carried_values(final: bool) -> None:
    """Carried values that feed each other need phis that read the old values; the inner loop may not run at all."""
    code = Code()
    o, zero, end = code.arg(0, dtypes.int64), code.index(0), code.put("END_", INDEX, 1)
    a0, b0 = code.const(dtypes.int64, 0), code.const(dtypes.int64, 1)
    outer = code.loop(zero, end, 1, a0, b0)
    a, b = code.carry(outer, 0), code.carry(outer, 1)
    inner = code.loop(zero, outer, 1, a, b)
    x, y = code.carry(inner, 0), code.carry(inner, 1)
    code.end(inner, y, code.alu("ADD", x, y))
    code.store(o, outer, code.result(inner, 0))
    code.end(outer, code.result(inner, 1), code.result(inner, 0))
    code.store(o, end, code.result(outer, 1))
    out = np.zeros(8, np.int64)
    run(code, [out], end=6, final=final)
    want, p, q = [], 0, 1
    for k in range(6):
        u, v = p, q
        for _ in range(k):
            u, v = v, u + v
        want.append(u)
        p, q = v, u
    np.testing.assert_array_equal(out, [*want, q, 0])


def test_begin_and_end_cut_the_phase() -> None:
    code = Code()
    o, start, stop = code.arg(0, F32), code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1)
    loop = code.loop(start, stop, 1)
    code.store(o, loop, code.put("CAST", F32, 1, (loop,)))
    code.end(loop)
    out = np.full(10, -1, np.float32)
    run(code, [out], 3, 7)
    np.testing.assert_array_equal(out, [-1, -1, -1, 3, 4, 5, 6, -1, -1, -1])
    run(code, [out], 5, 5)
    np.testing.assert_array_equal(out, [-1, -1, -1, 3, 4, 5, 6, -1, -1, -1])


@pytest.mark.parametrize("divisor", [1, 3, 8, 10])
def test_index_division_of_known_and_unknown_sign(divisor: int) -> None:
    """A loop index is known to be non-negative, a variable is not: both divide to minus infinity."""
    code = Code()
    o, end, shift = code.arg(0, dtypes.int64), code.put("END_", INDEX, 1), code.put("VAR", INDEX, 1, (), "shift")
    d = code.index(divisor)
    loop = code.loop(code.index(0), end, 1)
    below = code.alu("ADD", loop, shift)
    for k, value in enumerate((loop, below)):
        for j, op in enumerate(("IDIV", "MOD")):
            at = code.put("MULACC", INDEX, 1, (loop, code.index(4), code.index(2 * k + j)))
            code.store(o, at, code.put("CAST", dtypes.int64, 1, (code.alu(op, value, d),)))
    code.end(loop)
    out = np.zeros(80, np.int64)
    run(code, [out], end=20, variables={"shift": -11})
    i = np.arange(20)
    want = np.stack([i // divisor, i % divisor, (i - 11) // divisor, (i - 11) % divisor], 1)
    np.testing.assert_array_equal(out.reshape(20, 4), want)


# -- pointers, streams, refusals --------------------------------------------------------------------
def test_scratch_temporaries_and_streams() -> None:
    code = Code()
    o, s = code.arg(0, F32), code.put("SCRATCH", F32, 1, (), 64)
    t = code.put("TEMP", F32, 1, (), 0)  # after the program's two parameters
    zero, a = code.index(0), code.arg(1, F32)
    x = code.load(a, zero, 16)
    code.store(s, zero, code.alu("ADD", x, x))
    code.store(t, zero, code.load(s, zero, 16))
    code.store(o, zero, code.load(t, zero, 16), stream=True)
    x_, out, temporary = np.arange(16, dtype=np.float32), aligned(64).view(np.float32), np.zeros(16, np.float32)
    text = render(program(code, [out, x_]), HOST)
    assert "!nontemporal" in text and "sfence" in text
    alone = render(program(code, [out, x_]), HOST, aligned=True)
    assert "!nontemporal" in alone and alone.count("define ") == 1 and text.count("define ") == 3
    private = aligned(192)
    with LoadedProgram(compile_object(text, HOST), ("phase",)) as loaded:
        call_phase(loaded.addresses[0], [out.ctypes.data, x_.ctypes.data, temporary.ctypes.data], [], private.ctypes.data, 0, 1)
    np.testing.assert_array_equal(out, 2 * x_)
    np.testing.assert_array_equal(temporary, 2 * x_)
    np.testing.assert_array_equal(private[64:128].view(np.float32), 2 * x_)


def test_what_is_not_linear_is_refused() -> None:
    def refused(op: str, dtype: DType, arg: Any = None, operands: int = 2) -> None:
        code = Code()
        src = tuple(code.const(dtype, 1) for _ in range(operands))
        code.put(op, dtype, 1, src, arg)
        with pytest.raises(CompileError, match=op if op in ("EXP2", "IDIV", "LOOP") else "LINEAR"):
            render(program(code, []), BASELINE)
    refused("EXP2", F32, operands=1)
    refused("IDIV", F32)
    refused("FDIV", dtypes.int32)
    refused("SCALEB", dtypes.int32)
    refused("RECIPROCAL", dtypes.int32, operands=1)
    refused("SHL", F32)
    refused("LOOP", INDEX, arg=0)


@pytest.mark.parametrize("target", a_half([BASELINE, AVX2, AVX512]), ids=["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("final", [False, True])
def test_no_instruction_needs_a_library(target: Target, final: bool) -> None:
    """One object with all elementwise instructions and conversions of every dtype has no undefined symbols."""
    unary = {"NEG", "ABS", "SQRT", "FLOOR", "CEIL", "TRUNC", "ROUND", "RECIPROCAL", "NOT"}
    code = Code()
    zero = code.put("BEGIN", INDEX, 1)
    for dtype in STORABLE:
        p = code.arg(0, dtype)
        for lanes in (1, 16):
            x = code.load(p, zero, lanes)
            for op in ARITY:
                if op == "WHERE":
                    continue
                if (op == "SCALEB" and not target.has_scaleb) or (op == "POW2" and not target.has_pow2):
                    continue
                kinds = {"IDIV": "iu", "MOD": "iu", "SHL": "iu", "SHR": "iu", "FDIV": "f", "SCALEB": "f", "RECIPROCAL": "f", "SQRT": "f",
                         "MULACC": "fiu", "NEG": "fiu", "SUB": "fiu", "NOT": "iub", "AND": "iub", "OR": "iub", "XOR": "iub",
                         **dict.fromkeys(LEGAL_INTEGER, "iu")}.get(op, "fiub")
                if dtype.kind in kinds:
                    code.store(p, zero, code.alu(op, *[x] * (1 if op in unary else 3 if op == "MULACC" else 2)))
            for to in STORABLE:
                code.store(code.arg(0, to), zero, code.put("CAST", to, lanes, (x,)))
    assert undefined_symbols(compile_object(render(program(code, []), target), target, final)) == ()
