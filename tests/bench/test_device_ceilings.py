"""The ceilings of devices with groups: the kernels compute what the rates claim, and an adapter that is here gives sane ones."""
import numpy as np
import pytest

from svod.bench.device_ceilings import ROWS, STEPS, fma_ast, memory_ast
from svod.bench.roofline import measure_ceilings
from svod.compile.webgpu.adapter import adapter_target
from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import Kernel
from svod.core.spec.evaluate import evaluate
from svod.errors import DeviceError


def arguments(kernel, data, one):
    """Zeros for the output, `data` where so much is read, `one` for single elements."""
    return [np.zeros(p.arg.size, data.dtype) if p.arg.slot in kernel.outs else one if p.arg.size == 1 else data for p in kernel.params]


def test_the_chain_of_multiply_adds():
    kernel = Kernel(fma_ast(dtypes.float64, 7))
    x = want = np.linspace(0.1, 0.9, 7)
    for _ in range(STEPS):
        want = want * 0.9 + 0.9
    np.testing.assert_allclose(evaluate(kernel.ast, arguments(kernel, x, np.array([0.9])))[0], want, rtol=1e-12)


@pytest.mark.parametrize(("kind", "elements"), [("read", 13 * (ROWS + 1)), ("copy", 26), ("write", 13)])
def test_what_a_kernel_of_memory_moves(kind, elements):
    kernel = Kernel(memory_ast(kind, elements))
    assert sum(p.arg.size for p in kernel.params if p.arg.size > 1) == elements
    data = np.arange(1, elements - 12, dtype=np.float32)
    want = {"read": lambda: data.reshape(ROWS, 13).sum(0), "copy": lambda: 3 * data, "write": lambda: np.full(13, 3)}[kind]()
    np.testing.assert_allclose(evaluate(kernel.ast, arguments(kernel, data, np.array([3], np.float32)))[0], want)


def test_a_quick_measurement_of_the_adapter():
    try:
        target = adapter_target()
    except DeviceError as error:
        pytest.skip(str(error))
    found = measure_ceilings(target, quick=True)
    assert found.quick and set(found.flops) == {"float32"} and set(found.bandwidth["memory"]) == {"read", "write", "copy"}
    rates = [*found.flops["float32"], *(rate for pair in found.bandwidth["memory"].values() for rate in pair)]
    assert all(1e7 < rate < 1e15 for rate in rates) and 0 < found.dispatch[0] < 1e-1
