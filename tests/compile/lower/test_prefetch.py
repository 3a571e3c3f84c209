"""PREFETCH: the positions and addresses of the instructions; results do not change."""
from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.linear import format_linear, validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import CompileError, KernelOptError
from tests.agreement import Case, run_interpreted, run_native
from tests.compile.native import AVX512, TARGETS, Code, aligned, program, run, runnable_targets
from tests.draws import a_half
from tests.hand_kernels import correlate_backwards, gathered_rows, gemm, in_place, lines, padded_window, row_sums

Chain = list[list[Any]]


def lowered(kernel: Kernel, chain: Chain, target: Target = AVX512) -> Program:
    found = lower(apply_opts(Scheduler(kernel, replace(target, threads=4)), [Opt.from_json(o) for o in chain]))
    validate(found)
    return found


def ahead(found: Program) -> list[tuple[int, int, int]]:
    """List for each prefetch (slot, its distance from the first load with the same index in elements, elements of that load)."""
    out = []
    for code in found.code:
        for op, _, _, src, arg in code:
            if op == "PREFETCH":
                load = next(i for i in code if i[0] in ("LOAD", "LOADS") and i[3][:2] == src)
                out.append((code[src[0]][4], arg - (load[4] if load[0] == "LOAD" else load[4][0]), load[2]))
    return out


# -- positions of the instructions ----------------------------------------------------------------------
def test_addresses_are_iterations_ahead_of_the_loop_that_moves_the_load() -> None:
    """In c[24, 48] += a[24, 30]·b[30, 48] with two steps of the sum per iteration, prefetches are ahead by two rows of b and two elements
    of a per iteration."""
    tile: Chain = [["UPCAST", "o1", 16], ["UNROLL", "r0", 2]]
    kernel = Kernel(gemm(24, 48, 30))
    assert ahead(lowered(kernel, [*tile, ["PREFETCH", "p2", 3]])) == [(2, 3 * 2 * 48, 16), (2, 3 * 2 * 48 + 48, 16)]
    assert ahead(lowered(kernel, [*tile, ["PREFETCH", "p1", 5]])) == [(1, 5 * 2, 1)], "both elements are of one line"
    assert not ahead(lowered(kernel, tile))
    both = ahead(lowered(kernel, [*tile, ["PREFETCH", "p2", 1], ["PREFETCH", "p1", 1]]))
    assert sorted({slot for slot, _, _ in both}) == [1, 2]


def test_a_line_is_asked_for_once() -> None:
    """There is one prefetch per cache line: four for 64 floats, in vectors of 16 or 4 lanes, and one for 64 bytes."""
    for target in (AVX512, replace(AVX512, vector_bytes=16)):
        assert [a for _, a, _ in ahead(lowered(Kernel(lines(640)), [["UPCAST", "o0", 64], ["PREFETCH", "p1", 2]], target))] \
            == [128, 144, 160, 176]


def test_copies_are_prefetched_where_they_read() -> None:
    """For a copied panel of b the loads of the copy are prefetched, because they read an argument; the loads of its readers are not."""
    found = lowered(Kernel(gemm(24, 48, 30)), [["UPCAST", "o1", 16], ["SWAP", "o0", "o1"], ["STAGE", "s1", "o1"], ["PREFETCH", "p2", 4]])
    assert ahead(found) and {slot for slot, _, _ in ahead(found)} == {2}
    assert all(code[i[3][0]][0] == "ARG" for code in found.code for i in code if i[0] == "PREFETCH")


def test_stages_at_the_root_are_prefetched_where_they_are_read() -> None:
    """The packed columns of b are in a temporary in tiles of 16, of which two steps of the sum read 32 elements. The phase that packs them
    is not changed. If the stage is moved back into scratch, nothing is prefetched."""
    tile: Chain = [["UPCAST", "o1", 16], ["UNROLL", "r0", 2], ["STAGE", "s1", "root"], ["PREFETCH", "s1", 3]]
    kernel = Kernel(gemm(24, 48, 30))
    found = lowered(kernel, tile)
    assert ahead(found) == [(0, 3 * 2 * 16, 16), (0, 3 * 2 * 16 + 16, 16)]
    assert {code[i[3][0]][0] for code in found.code for i in code if i[0] == "PREFETCH"} == {"TEMP"}
    assert not ahead(lowered(kernel, [*tile, ["SWAP", "o0", "o1"], ["STAGE", "s1", "o1"]]))


def test_what_no_loop_moves_is_loaded_as_without_it() -> None:
    """If the loop disappears after the hint was given, there is no prefetch."""
    chain: Chain = [["PREFETCH", "p2", 4], ["UNROLL", "r0", 0], ["UPCAST", "o1", 0]]
    assert not ahead(lowered(Kernel(gemm(2, 4, 3)), chain))


def test_rows_that_are_looked_up_are_prefetched_along_the_row() -> None:
    """In a lookup of rows, the row number is loaded outside the loop over columns, so the columns of the row are prefetched; the row
    numbers are prefetched along the loop over rows."""
    kernel = Kernel(gathered_rows(9, 20, 13, 8))
    found = [lowered(kernel, [["PREFETCH", f"p{slot}", 2]]) for slot in range(1, len(kernel.params))]
    assert any(ahead(f) for f in found)


# -- code -----------------------------------------------------------------------------------------------
def test_it_is_an_instruction() -> None:
    """LINEAR, LLVM's text and machine code have one prefetch into all caches per line, next to the load."""
    found = lowered(Kernel(lines(640)), [["UPCAST", "o0", 32], ["PREFETCH", "p1", 2]])
    assert len(re.findall(r"^ +PREFETCH float32 %\d+, %\d+ \[\d+\]$", format_linear(found), re.M)) == 2
    text = render(found, AVX512)
    assert text.count("call void @llvm.prefetch.p0(ptr ") == 2 and "i32 0, i32 3, i32 1)" in text
    assert "inbounds" not in text
    plain = render(lowered(Kernel(lines(640)), [["UPCAST", "o0", 32]]), AVX512)
    prefetcht0 = re.compile(rb"\x0f\x18[\x08-\x0f\x48-\x4f\x88-\x8f]")     # 0F 18 /1
    assert len(prefetcht0.findall(compile_object(text, AVX512))) == 2
    assert not prefetcht0.findall(compile_object(plain, AVX512))


@TARGETS
def test_machine_code_may_ask_for_any_address(target: Target) -> None:
    """Prefetches far outside the argument, in both directions and in unmapped memory, do not fault."""
    code = Code()
    x, y = code.arg(0, dtypes.float32), code.arg(1, dtypes.float32)
    for offset in (-(1 << 40), -1, 7, 1 << 20, 1 << 44):
        code.put("PREFETCH", dtypes.float32, 1, (x, code.index(0)), offset)
    code.store(y, code.index(0), code.load(x, code.index(0), 4))
    source, got = aligned(16).view(np.float32), aligned(16).view(np.float32)
    source[:] = (1, 2, 3, 4)
    run(code, [source, got], target=target)
    assert np.array_equal(got, source)


def test_linear_refuses_what_is_no_argument() -> None:
    code = Code()
    scratch = code.put("SCRATCH", dtypes.float32, 1, (), 0)
    code.put("PREFETCH", dtypes.float32, 1, (scratch, code.index(0)), 0)
    with pytest.raises(CompileError, match="is no argument or temporary of float32"):
        validate(program(code, [], scratch=64))


# -- numbers --------------------------------------------------------------------------------------------
SHAPES = [(1, 1, 1), (1, 17, 31), (13, 1, 7), (19, 23, 1), (17, 19, 23), (33, 47, 29)]


@TARGETS
@pytest.mark.parametrize("seed", a_half(range(4)))
def test_products_are_those_of_numpy(target: Target, seed: int) -> None:
    """With all possible prefetches, products with tiles that do not divide, copies of both operands and sums in parts equal NumPy's."""
    rng = np.random.default_rng(seed)
    target, stood = replace(target, threads=4), 0
    for m, n, k in SHAPES:
        state = Scheduler(Kernel(gemm(m, n, k)), target)
        more = [["UPCAST", "o0", 4], ["UPCAST", "o1", 16], ["UNROLL", "r0", int(rng.integers(2, 5))], ["STAGE", "s1", "o1"],
                ["STAGE", "s0", "root"], ["THREAD", "r0", 2], ["TILE", "o1", 3], ["SWAP", "o0", "o1"]]
        rng.shuffle(more)
        for opt in [*more[:5], *(["PREFETCH", source, int(rng.integers(1, 65))] for source in ("p1", "p2", "s0", "s1"))]:
            with suppress(KernelOptError):
                state = apply_opt(state, Opt.from_json(opt))
        found = lower(state)
        validate(found)
        stood += sum(i[0] == "PREFETCH" for code in found.code for i in code) > 0
        a, b, c = (aligned(4 * size).view(np.float32) for size in (m * k, k * n, m * n))
        a[:], b[:] = (rng.integers(-4, 5, x.size) for x in (a, b))
        temps = [aligned(size) for size in found.spec.temps]
        with LoadedProgram(compile_object(render(found, target), target), [p.symbol for p in found.spec.phases]) as loaded:
            for phase, address in zip(found.spec.phases, loaded.addresses, strict=True):
                private = aligned(max(64, phase.scratch_bytes))
                call_phase(address, [x.ctypes.data for x in (c, a, b, *temps)], (), private.ctypes.data, 0, phase.extent)
        assert np.array_equal(c.reshape(m, n), np.maximum(a.reshape(m, k) @ b.reshape(k, n), -1)), state.applied_opts
    assert stood >= len(SHAPES) - 2, "few of the shapes have loops that prefetches are ahead of"


KERNELS = {"strided": lambda: row_sums(13, 37, by_column=True), "backwards": lambda: correlate_backwards(41, 5),
           "in place": lambda: in_place(3, 37),
           "masked": lambda: padded_window(9, 17, 3), "looked up": lambda: gathered_rows(9, 20, 13, 8)}


@pytest.mark.parametrize("name", KERNELS)
def test_all_kinds_of_loads(name: str) -> None:
    """Strided, reversed and masked loads, loads of written memory and of looked-up rows are prefetched and give the evaluator's results."""
    case = Case(Kernel(KERNELS[name]()))
    target = replace(next(iter(runnable_targets().values())), threads=4)
    stood = 0
    for amount in (0, 4, 7):
        state = Scheduler(case.kernel, target)
        for opt in [Opt("UPCAST", "o0", amount), *(Opt("PREFETCH", f"p{slot}", 9) for slot in range(len(case.kernel.params)))]:
            with suppress(KernelOptError):
                state = apply_opt(state, opt)
        found = lower(state)
        validate(found)
        stood += len([i for code in found.code for i in code if i[0] == "PREFETCH"])
        run_interpreted(case, found, 3)
        run_native(case, found, target, 2)
    assert stood
