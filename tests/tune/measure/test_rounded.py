"""Verification of kernels with rounded factors: right ones pass by the errors of the rewritten kernel alone, and faults are found."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from svod.compile.cpu.host import host_target
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.serialize import ast_to_data
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.algorithms.rounding import rounded
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import FAST
from svod.tune.measure.context import KernelContext, Setup
from svod.tune.measure.work import compile_candidate, verify_candidate
from tests.core.corpus import data, kernel_of
from tests.tune.measure.test_algorithms import compared

KERNELS = {
    "product": Kernel(kernel_of(data(9, 33) @ data(33, 17))),
    "linear": Kernel(kernel_of((data(5, 64) @ data(64, 16) + data(16)).relu())),
    "convolution": Kernel(kernel_of(data(1, 6, 9, 7).conv2d(data(5, 6, 3, 3), padding=1, stride=2).relu())),
}
NEEDED = {"amx", "avx512f", "bf16"}
CHAIN = [["ROUND", "out", "bfloat16"], ["TC", "r0", ["amxbf16", "o0", "o1"]], ["UPCAST", "o1", 2]]


@pytest.mark.parametrize("name", KERNELS)
def test_a_rounded_kernel_passes(name: str) -> None:
    kernel = KERNELS[name]
    ast = rounded(kernel, "out", "bfloat16").ast
    assert compared(kernel, ast, ast).right
    assert compared(kernel, ast, kernel.ast).right, "more exact factors are right as well"


@pytest.mark.parametrize("name", KERNELS)
def test_the_errors_of_float32_do_not_allow_it(name: str) -> None:
    kernel = KERNELS[name]
    assert compared(kernel, kernel.ast, rounded(kernel, "out", "bfloat16").ast).right is False


def faults(ast: UOp) -> Iterator[tuple[str, UOp]]:
    """Rounded kernels with one fault each: a last product left out, factors from the position before, one factor twice, no epilogue."""
    reduce, = [u for u in ast.toposort() if u.op is Ops.REDUCE]
    one, other = reduce.src[0].src
    for r in reduce.src[1:]:
        if sy.extent_of(r) > 1:
            here = UOp(Ops.CMPLT, dtypes.bool, (r, sy.const(sy.extent_of(r) - 1)))
            product = here.alu(Ops.WHERE, reduce.src[0], UOp.const(reduce.dtype, 0))
            yield "the last product is left out", ast.substitute({reduce: reduce.replace(src=(product, *reduce.src[1:]))})
    for f in (one, other):
        first = f.src[1]
        if first.op is Ops.RANGE and sy.extent_of(first) > 1:
            still = f.replace(src=(f.src[0], sy.const(0), *f.src[2:]))
            yield "a factor does not move", ast.substitute({f: still})
    yield "the square of a factor", ast.substitute({reduce: reduce.replace(src=(reduce.src[0].replace(src=(one, one)), *reduce.src[1:]))})
    wide = one.src[0].src[0]
    yield "a factor that is a little too large", ast.substitute({wide: wide.replace(src=(wide.src[0].replace(src=(
        UOp(Ops.MUL, dtypes.float32, (wide.src[0].src[0], UOp.const(dtypes.float32, 1.0625))),)),))})


@pytest.mark.parametrize("name", KERNELS)
def test_faults_are_found(name: str) -> None:
    kernel = KERNELS[name]
    ast = rounded(kernel, "out", "bfloat16").ast
    found = list(faults(ast))
    assert len(found) >= 4
    for what, faulty in found:
        assert compared(kernel, ast, faulty).right is False, what


@pytest.mark.skipif(not set(host_target().features) >= NEEDED, reason="needs a CPU with AMX and AVX-512 BF16")
def test_a_worker_verifies_machine_code() -> None:
    context = KernelContext(Setup(ast_to_data(KERNELS["product"].ast), replace(host_target(), numerics=FAST)))
    try:
        built = compile_candidate((CHAIN, False), context)
        assert built.algorithm == (("ROUND", "out", "bfloat16"),)
        assert verify_candidate((built, None, [()], 5.0), context).right
    finally:
        context.close()
