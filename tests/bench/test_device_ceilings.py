"""The ceilings of devices with groups: kernels compute the number of operations that rates assume, and a real adapter, if present, gives
plausible rates."""
import numpy as np
import pytest

from svod.bench import device_ceilings
from svod.bench.device_ceilings import (
    GROUPS,
    STEPS,
    SUMMED_ROWS,
    TILE,
    TURNS,
    fma_ast,
    matrix_ast,
    matrix_dots,
    matrix_state,
    measure_figures,
    memory_ast,
)
from svod.bench.roofline import Ceilings, measure_ceilings
from svod.compile.backend import backend_named
from svod.compile.cuda import ptxas
from svod.compile.lower.lower import lower
from svod.compile.webgpu.adapter import adapter_target
from svod.core.graph.buffer import bfloat16_bits_to_float32
from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import Kernel
from svod.core.machine.isa import DOTS
from svod.core.spec.evaluate import evaluate
from svod.errors import DeviceError, UnsupportedError
from tests.agreement import Case
from tests.compile.cuda.emulator import run_program
from tests.compile.cuda.target import card_target

BF16, F16, F32, F64, I8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.float64, dtypes.int8


def arguments(kernel, data, one):
    """Zeros for the output, `data` for inputs of that size, `one` for single elements."""
    return [np.zeros(p.arg.size, data.dtype) if p.arg.slot in kernel.outs else one if p.arg.size == 1 else data for p in kernel.params]


def test_the_chain_of_multiply_adds():
    kernel = Kernel(fma_ast(dtypes.float64, 7))
    x = want = np.linspace(0.1, 0.9, 7)
    for _ in range(STEPS):
        want = want * 0.9 + 0.9
    np.testing.assert_allclose(evaluate(kernel.ast, arguments(kernel, x, np.array([0.9])))[0], want, rtol=1e-12)


@pytest.mark.parametrize(("kind", "elements"), [("read", 13 * (SUMMED_ROWS + 1)), ("copy", 26), ("write", 13)])
def test_what_a_kernel_of_memory_moves(kind, elements):
    kernel = Kernel(memory_ast(kind, elements))
    assert sum(p.arg.size for p in kernel.params if p.arg.size > 1) == elements
    data = np.arange(1, elements - 12, dtype=np.float32)
    want = {"read": lambda: data.reshape(SUMMED_ROWS, 13).sum(0), "copy": lambda: 3 * data, "write": lambda: np.full(13, 3)}[kind]()
    np.testing.assert_allclose(evaluate(kernel.ast, arguments(kernel, data, np.array([3], np.float32)))[0], want)


@pytest.mark.slow
def test_a_quick_measurement_of_the_adapter():
    try:
        target = adapter_target()
    except DeviceError as error:
        pytest.skip(str(error))
    found = measure_ceilings(target, quick=True)
    assert found.quick and set(found.flops) == {"float32"} and set(found.bandwidth["memory"]) == {"read", "write", "copy"}
    rates = [*found.flops["float32"], *(rate for pair in found.bandwidth["memory"].values() for rate in pair)]
    assert all(1e7 < rate < 1e15 for rate in rates) and 0 < found.dispatch[0] < 1e-1


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name", "tile"), [
    ("sm_80", "mma_bf16", (64, 64)), ("sm_75", "mma_f16k8", (64, 64)), ("sm_80", "mma_s8", (64, 64)), ("sm_75", "mma_s8k16", (32, 64)),
    ("sm_80", "mma_tf32", (64, 64)), ("sm_90a", "wgmma_bf16n256", (64, 256))])
def test_a_loop_of_matrix_instructions(arch, name, tile):
    """The emulated GPU sums up the product so many times, as NumPy does."""
    dot, target, turns = DOTS[name], card_target(arch, group_threads=128).allowing(True, True, True), 3
    assert dot in matrix_dots(target)
    rows, columns = 2 * tile[0], tile[1]
    kernel = Kernel(matrix_ast(dot, rows, columns, turns))
    case = Case(kernel, 3)
    a, b = (x.astype(np.float64) if p.dtype != BF16 else bfloat16_bits_to_float32(x).astype(np.float64)
            for x, p in zip(case.args, kernel.params, strict=True) if p.arg.slot not in kernel.outs)
    want = turns * (a.reshape(rows, -1) @ b.reshape(columns, -1).T)
    got = bfloat16_bits_to_float32(case.want[0]) if dot.operands[0] == BF16 else case.want[0]
    np.testing.assert_allclose(got.reshape(rows, columns), want, rtol=0, atol=0 if dot.operands[0] == I8 else 1e-2 * np.abs(want).max())
    program = lower(matrix_state(kernel, target, dot, tile))
    args = case.fresh()
    run_program(program, target, args)
    case.check(args, "the emulated GPU")


@pytest.mark.parametrize(("arch", "names"), [("sm_75", ["mma_f16k8", "mma_s8k16"]), ("sm_80", ["mma_bf16", "mma_f16", "mma_s8"]),
                                             ("sm_90a", ["wgmma_bf16n256", "wgmma_f16n256", "wgmma_s8n256"])])
def test_the_loop_of_the_largest_instructions_spills_nothing(arch, names):
    """The kernel of wgmma is only lowered: ptxas takes seconds for it."""
    target = card_target(arch)
    assert [dot.name for dot in matrix_dots(target)] == names
    dot, pair = matrix_dots(target)[-1], backend_named(target.device).compilers[0]
    state = matrix_state(Kernel(matrix_ast(dot, 16 * TILE[0], TILE[1], TURNS)), target, dot, TILE)
    program = lower(state)
    phase, = program.spec.phases
    assert phase.extent == 16 and phase.block <= 512
    if dot.reads_shared:
        return
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    (needed,) = pair.resources(pair.binary_of(program, target), program.spec, target)
    assert needed.spill_stores == 0


def test_a_type_has_the_rate_of_its_matrix_instructions(monkeypatch):
    """The clock returns 1 ms for products of 16-bit numbers, 2 ms for other products, and 8 s for all other kernels."""
    def seconds(target, ast, samples):
        if F64 in {p.dtype for p in Kernel(ast).params}:
            raise UnsupportedError("no float64")
        return 8.0

    def fastest(kernel, states, samples):
        return 1e-3 if {p.dtype for p in kernel.params} <= {BF16, F16} else 2e-3
    monkeypatch.setattr(device_ceilings, "_seconds", seconds)
    monkeypatch.setattr(device_ceilings, "_fastest", fastest)

    def ceilings(target):
        figures = measure_figures(target, 1, quick=False)
        return Ceilings(target.key, 1, False, figures.flops, figures.bandwidth, figures.dispatch, figures.curve)
    card = card_target("sm_80")
    plain, work = ceilings(card), 2.0 * TILE[0] * TILE[1] * GROUPS * card.units * TURNS
    assert {name: one for name, (one, _) in plain.flops.items() if name != "float32"} == {
        "bfloat16": 16 * work / 1e-3, "float16": 16 * work / 1e-3, "int8": 32 * work / 2e-3}
    assert plain.flops_per_second(F32) == plain.flops["float32"][0] < 8 * work / 2e-3
    bound = plain.bound(((BF16, 2 * 4096 ** 3),), 0, 0, card)
    assert bound.by == "compute" and bound.seconds == pytest.approx(2 * 4096 ** 3 / (16 * work) * 1e-3)
    assert ceilings(card.allowing(True, True, True)).flops_per_second(F32) == 8 * work / 2e-3
    without = ceilings(card.allowing(False, True))
    assert set(without.flops) == {"float32", "float16"} and without.flops["float16"] == without.flops["float32"]
