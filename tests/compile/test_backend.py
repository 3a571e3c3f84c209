"""Names of devices, and the two compilers of the CPU: each stage of both, from source and from bytes."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from svod import PrepareConfig, Tensor
from svod.compile.backend import CompilerPair, backend_named, device_named
from svod.compile.cpu.host import host_target
from svod.compile.cpu.interpreted import InterpretedProgram
from svod.compile.lower.lower import lower
from svod.compile.lower.program import PhaseSpec, Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.object_cache import Build, CachedObject, ObjectCache, ObjectKey
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import to_numpy
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import CompileError, UnsupportedError
from tests.draws import a_half
from tests.hand_kernels import HAND

PAIRS = backend_named("CPU").compilers


def test_names_of_devices() -> None:
    """The key of a target does not contain the number of its device, as code does not depend on it."""
    assert device_named("cpu") == device_named("CPU:0") == device_named("CPU")
    assert device_named("CPU").pair.name == "llvm" and device_named("cpu:Interpreter").pair.name == "interpreter"
    assert len({p.key for p in PAIRS}) == len(PAIRS) == 2
    for name, said in (("TPU:1", "no device 'TPU:1': use one of CPU, WEBGPU, CUDA"),
                       ("CPU:1", "no device 'CPU:1': use CPU, CPU:llvm, CPU:interpreter"), ("CPU:gcc", "use CPU, CPU:llvm")):
        with pytest.raises(UnsupportedError, match=said):
            device_named(name)


def program_of(name: str) -> Program:
    return lower(Scheduler(Kernel(HAND[name]()), host_target(2)))


def code_of(program: Program, pair: CompilerPair) -> bytes:
    target = host_target(2)
    return pair.compile(pair.render(program, target), target)


def run(program: Program, code: bytes, pair: CompilerPair) -> list[Array]:
    """Run the code once; returns the arguments afterwards. Each call starts from the same random arguments."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(-4, 5, size).astype(to_numpy(dtype)) for dtype, size in program.spec.params]
    ExecutionPlan.of_kernel(program.spec, pair.load(code, program.spec), arrays, threads=2).execute()
    return arrays


@pytest.mark.parametrize("name", a_half([
    "hand_gemm", "hand_softmax", "gathered_rows", "two_outputs_one_stage", "argmax_rows", "elementwise_int8", "sums_uint16",
    "elementwise_bf16"]))
def test_both_pairs_compute_the_same_from_source_and_from_bytes(name: str, tmp_path: Path) -> None:
    target, program = host_target(2), program_of(name)
    found = []
    for k, pair in enumerate(PAIRS):
        source = pair.render(program, target)
        code = pair.compile(source, target)
        cache = ObjectCache(tmp_path)
        key = ObjectKey(str(k), "c", Build("t", 1, "llvm"))
        cache.put(key, CachedObject(program.spec, code))
        again = cache.get(key)
        assert source and again is not None and again.code == code == code_of(program, pair)
        found.append(run(program, again.code, pair))
    for compiled, interpreted in zip(*found, strict=True):
        np.testing.assert_allclose(compiled.astype(np.float64), interpreted.astype(np.float64), rtol=1e-5)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_each_stage_refuses_what_the_one_before_cannot_have_made(pair: CompilerPair) -> None:
    target, program = host_target(2), program_of("line")
    source = pair.render(program, target)
    for text in ("", "no source", source[:len(source) // 2]):
        with pytest.raises(CompileError):
            pair.load(pair.compile(text, target), program.spec)
    for code in (b"", b"no code", b"\xff\xfe"):
        with pytest.raises(CompileError):
            pair.load(code, program.spec)
    with pytest.raises(CompileError, match=r"does not define another|has 1 phases, the program \w+ 2"):
        pair.load(code_of(program, pair), replace(program.spec, phases=(*program.spec.phases, PhaseSpec("another", 4, 1, 0))))


def test_a_plan_runs_on_the_pair_that_its_device_names() -> None:
    x = np.random.default_rng(1).normal(size=(13, 7)).astype(np.float32)
    config = PrepareConfig(device="CPU:interpreter", db=":none:", object_cache=":none:")
    y = Tensor(x).softmax(-1).cumsum(1)
    plan = y.prepare(config)
    assert all(isinstance(k.loaded, InterpretedProgram) for k in plan.kernels)
    plan.execute()
    np.testing.assert_allclose(y.numpy(), Tensor(x).softmax(-1).cumsum(1).numpy(), rtol=1e-6)


def test_what_fails_in_an_interpreted_kernel_is_raised_by_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    program, pair = program_of("line"), PAIRS[1]
    loaded = pair.load(code_of(program, pair), program.spec)
    arrays = [np.zeros(size, to_numpy(dtype)) for dtype, size in program.spec.params]
    plan = ExecutionPlan.of_kernel(program.spec, loaded, arrays)

    def fail(*_: object) -> None:
        raise CompileError("out of bounds")
    with monkeypatch.context() as patched:
        patched.setattr(InterpretedProgram, "_run", fail)
        with pytest.raises(CompileError, match="out of bounds"):
            plan.execute()
    plan.execute()
    assert (arrays[0] == 1).all()


def test_an_interrupt_in_an_interpreted_kernel_is_raised_by_the_plan_that_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted plan raises it, even if a second plan with the same code runs before the first checks for failures."""
    program, pair = program_of("line"), PAIRS[1]
    loaded = pair.load(code_of(program, pair), program.spec)
    arrays = [np.zeros(size, to_numpy(dtype)) for dtype, size in program.spec.params]
    plan = ExecutionPlan.of_kernel(program.spec, loaded, arrays)
    other = plan.replicate()
    native = plan._devices.queue._run
    overtook: list[bool] = []

    def overtaken(words: int) -> None:
        native(words)
        with monkeypatch.context() as restored:
            restored.setattr(InterpretedProgram, "_run", run_phase)
            other.execute()
        overtook.append(True)       # an error of one plan is not raised by the other

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt
    run_phase = InterpretedProgram._run
    with monkeypatch.context() as patched:
        patched.setattr(InterpretedProgram, "_run", interrupt)
        patched.setattr(plan._devices.queue, "_run", overtaken)
        with pytest.raises(KeyboardInterrupt):
            plan.execute()
    assert overtook and (other.outputs[0] == 1).all() and (arrays[0] == 0).all()
    plan.execute()
    assert (arrays[0] == 1).all()
