"""The ceilings of devices with groups: the kernels compute what the rates claim, and an adapter that is here gives sane ones."""
import numpy as np
import pytest

from svod.bench import device_ceilings
from svod.bench.device_ceilings import ROWS, SIDE, STEPS, fma_ast, matrix_ast, matrix_types, measure_figures, memory_ast
from svod.bench.roofline import Ceilings, measure_ceilings
from svod.compile.lower.lower import lower
from svod.compile.webgpu.adapter import adapter_target
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.graph.buffer import bfloat16_bits_to_float32
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS
from svod.core.spec.evaluate import evaluate
from svod.errors import DeviceError, UnsupportedError
from tests.agreement import Case
from tests.compile.cuda.emulator import run_program
from tests.compile.cuda.target import card_target

BF16, F16, F32, F64, I8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.float64, dtypes.int8


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


@pytest.mark.parametrize(("dtype", "arch", "name"), [(BF16, "sm_80", "mma_bf16"), (F16, "sm_75", "mma_f16k8"), (I8, "sm_80", "mma_s8"),
                                                     (F32, "sm_80", "mma_tf32")], ids=lambda v: getattr(v, "name", v))
def test_a_product_by_matrix_instructions(dtype, arch, name):
    """The emulated GPU computes the product, as NumPy does, by the instructions whose rate is meant."""
    side, target = 16, card_target(arch, group_threads=32).allowing(True, True, True)
    assert dtype in matrix_types(target)
    kernel = Kernel(matrix_ast(dtype, side))
    case = Case(kernel, 3)
    a, b = (x.astype(np.float64) if dtype != BF16 else bfloat16_bits_to_float32(x).astype(np.float64)
            for x, p in zip(case.args, kernel.params, strict=True) if p.arg.slot not in kernel.outs)
    want = a.reshape(side, 2 * side) @ b.reshape(side, 2 * side).T
    got = bfloat16_bits_to_float32(case.want[0]) if dtype == BF16 else case.want[0]
    np.testing.assert_allclose(got.reshape(side, side), want, rtol=0, atol=0 if dtype == I8 else 1e-2 * np.abs(want).max())
    state = apply_opt(Scheduler(kernel, target), Opt("TC", "r0", (name, "o0", "o1")))
    program = lower(state)
    assert any(i.op == "MMA" for code in program.code for i in code)
    args = case.fresh()
    run_program(program, target, args)
    case.check(args, "the emulated GPU")


@pytest.mark.parametrize(("arch", "types", "scheduled"), [("sm_75", {F16, I8}, (F16, I8)), ("sm_80", {BF16, F16, I8}, (I8,)),
                                                         ("sm_90a", {BF16, F16, I8}, (BF16, I8))])
def test_the_heuristic_takes_the_fastest_matrix_instructions(arch, types, scheduled):
    target = card_target(arch)
    assert set(matrix_types(target)) == types
    for dtype in scheduled:
        state = group_heuristic(Scheduler(Kernel(matrix_ast(dtype, SIDE)), target))
        chosen = state.dots[state.kernel.output]
        assert chosen is not None and DOTS[chosen.name].operands[0] == dtype
        assert DOTS[chosen.name].reads_shared == any(d.reads_shared and d.runs_on(target) for d in DOTS.values())


def test_a_type_has_the_rate_of_its_matrix_instructions(monkeypatch):
    """The clock says 1 ms for products of matrices of 16-bit numbers, 2 ms for the others, and 8 s for all else."""
    def seconds(target, ast, samples, sketches=0):
        types = {p.dtype for p in Kernel(ast).params}
        if F64 in types:
            raise UnsupportedError("no float64")
        is_product = len(types) == 1 + (I8 in types) and max(p.arg.size for p in Kernel(ast).params) == 2 * SIDE ** 2
        return 8.0 if not is_product else 1e-3 if types <= {BF16, F16} else 2e-3
    monkeypatch.setattr(device_ceilings, "_seconds", seconds)

    def ceilings(target):
        figures = measure_figures(target, 1, quick=False)
        return Ceilings(target.key, 1, False, figures.flops, figures.bandwidth, figures.dispatch, figures.curve)
    plain, work = ceilings(card_target("sm_80")), 4.0 * SIDE ** 3
    assert {name: one for name, (one, _) in plain.flops.items() if name != "float32"} == {
        "bfloat16": work / 1e-3, "float16": work / 1e-3, "int8": work / 2e-3}
    assert plain.flops_per_second(F32) == plain.flops["float32"][0] < work / 1e-3
    bound = plain.bound(((BF16, 2 * 4096 ** 3),), 0, 0, card_target("sm_80"))
    assert bound.by == "compute" and bound.seconds == pytest.approx(2 * 4096 ** 3 / work * 1e-3)
    assert ceilings(card_target("sm_80").allowing(True, True, True)).flops_per_second(F32) == work / 2e-3
    without = ceilings(card_target("sm_80").allowing(False, True))
    assert set(without.flops) == {"float32", "float16"} and without.flops["float16"] == without.flops["float32"]
