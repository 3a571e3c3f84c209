"""Hand-written outlines of plans, as captures store them, from the kernels of `tests.tune.search_kernels`."""
from __future__ import annotations

from svod.compile.plan.unbound_plan import BufferSpec, Call, UnboundPlan
from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.canonical import canonicalize
from tests.tune import search_kernels


def canonical(kernel: Kernel) -> Kernel:
    """A hand-written kernel in the canonical form that keys are made of; parameters keep their order here."""
    return Kernel(canonicalize(kernel.ast)[0])


def gemm_then_softmax(m: int = 24, n: int = 40, k: int = 16) -> UnboundPlan:
    """softmax(a @ b): two kernels, one intermediate."""
    gemm, softmax = canonical(search_kernels.gemm(m, n, k)), canonical(search_kernels.softmax(m, n))
    f32 = dtypes.float32
    assert gemm.outs == softmax.outs == (0,), "the order of the other slots is the canonical form's"
    inputs = [BufferSpec(f32, p.arg.size, "input") for p in gemm.params[1:]]
    buffers = (BufferSpec(f32, m * n, "intermediate"), *inputs, BufferSpec(f32, m * n, "output"))
    calls = (Call(gemm.key, (0, 1, 2), "gemm", "block.linear", "", 0, (0, 0, 0)),
             Call(softmax.key, (3, 0), "softmax", "block.softmax", "", 1, (0, 0)))
    return UnboundPlan(calls, buffers, (3,), {gemm.key: gemm, softmax.key: softmax})


def scaled(n: int = 1000, times: int = 1) -> UnboundPlan:
    """The same elementwise kernel, `times` times in a row."""
    kernel = canonical(search_kernels.elementwise(n))
    f32 = dtypes.float32
    buffers = (*(BufferSpec(f32, n, "input") for _ in range(2)), *(BufferSpec(f32, n, "output") for _ in range(times)))
    calls = tuple(Call(kernel.key, (2 + i, 0, 1), "scale", f"layers.{i}", "", 0, (0, 0, 0)) for i in range(times))
    return UnboundPlan(calls, buffers, tuple(range(2, 2 + times)), {kernel.key: kernel})
