"""ProgramSpecs agree with their kernels; each stage refuses an invalid program before anything runs."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.llvm.render import render
from svod.compile.lower.lower import lower
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.object_cache import Build, CachedObject, ObjectCache, ObjectKey, spec_from_json, spec_to_json
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import CompileError, LaunchError
from tests.compile import loop_kernels
from tests.core.corpus import CORPUS
from tests.draws import a_quarter

GOOD = ProgramSpec("k", ((dtypes.int64, 4), (dtypes.int64, 4)), (0,), (64,), (PhaseSpec("a", 4, 1, 0, True), PhaseSpec("b", 4, 2, 64)),
                   ("m", "n"))


@pytest.mark.parametrize("name", a_quarter(CORPUS))
def test_a_spec_is_derived_from_its_kernel(name: str) -> None:
    """The spec has the parameters by slot, without gaps and repetitions, the slots of the STOREs, and the phases of the code."""
    ast = CORPUS[name]()
    program = lower(Scheduler(Kernel(ast), host_target(2)))
    params = {u.arg.slot: (u.dtype, u.arg.size) for u in ast.walk(Ops.PARAM)}
    spec = program.spec
    assert list(spec.params) == [params[slot] for slot in range(len(params))]
    assert list(spec.outs) == sorted({store.src[0].src[0].arg.slot for store in ast.src})
    assert len(program.code) == len(spec.phases) and not spec.variables
    spec.check()


BAD = {
    "no parameters": replace(GOOD, params=()),
    "writes none of its parameters": replace(GOOD, outs=()),
    r"slots it writes are \(2,\)": replace(GOOD, outs=(2,)),
    r"slots it writes are \(-1, 0\)": replace(GOOD, outs=(-1, 0)),
    r"slots it writes are \(1, 0\)": replace(GOOD, outs=(1, 0)),
    r"slots it writes are \(0, 0\)": replace(GOOD, outs=(0, 0)),
    "a parameter or a temporary has a negative size": replace(GOOD, temps=(-1,)),
    "variables are n, m;": replace(GOOD, variables=("n", "m")),
    "variables are n, n;": replace(GOOD, variables=("n", "n")),
    "no phases": replace(GOOD, phases=()),
    "-1 iterations on 1 threads": replace(GOOD, phases=(PhaseSpec("a", -1, 1, 0),)),
    "4 iterations on 0 threads": replace(GOOD, phases=(PhaseSpec("a", 4, 0, 0),)),
    "once must come before": replace(GOOD, phases=(PhaseSpec("a", 4, 1, 0), PhaseSpec("b", 4, 1, 0, True))),
    "one symbol: a, a": replace(GOOD, phases=(PhaseSpec("a", 4, 1, 0), PhaseSpec("a", 4, 1, 0))),
}


@pytest.mark.parametrize("what", BAD)
def test_a_spec_that_cannot_be_is_refused_before_it_runs(what: str, tmp_path: Path) -> None:
    GOOD.check()
    with pytest.raises(LaunchError, match=f"program k: .*{what}"):
        BAD[what].check()
    # also one that a cache brought back
    cache = ObjectCache(tmp_path)
    key = ObjectKey("k", "c", Build("t", 1, "llvm"))
    cache.put(key, CachedObject(BAD[what], b"code"))
    found = cache.get(key)
    assert found is not None and found.spec == BAD[what]
    arrays = [np.zeros(4, np.int64) for _ in found.spec.params]
    with pytest.raises(LaunchError, match=what):
        ExecutionPlan.of_kernel(found.spec, loop_kernels.loaded("affine", "count"), arrays, constants=[1])


def test_each_stage_of_a_program_refuses_what_the_one_before_did_not_make() -> None:
    target = host_target(1)
    program = lower(Scheduler(Kernel(next(iter(CORPUS.values()))()), target))
    source = render(program, target)
    binary = compile_object(source, target)
    symbols = [p.symbol for p in program.spec.phases]
    assert LoadedProgram(binary, symbols).addresses
    with pytest.raises(CompileError, match="does not accept the module"):
        compile_object(source.replace("define", "defined", 1), target)
    with pytest.raises(CompileError, match="calls malloc"):
        compile_object("declare ptr @malloc(i64)\ndefine ptr @f() {\n  %p = call ptr @malloc(i64 8)\n  ret ptr %p\n}", target)
    with pytest.raises(CompileError, match="not a 64-bit"):
        LoadedProgram(source.encode(), symbols)
    with pytest.raises(CompileError, match="does not define another"):
        LoadedProgram(binary, [*symbols, "another"])
    with pytest.raises(LaunchError, match="its code has the addresses"):
        spec = replace(GOOD, phases=(*GOOD.phases, PhaseSpec("c", 4, 1, 0)))
        ExecutionPlan.of_kernel(spec, loop_kernels.loaded("affine", "count"), [np.zeros(4, np.int64)] * 2, constants=[1])
    with pytest.raises(ValueError, match="not the description of a program"):
        spec_from_json({**spec_to_json(GOOD), "params": [["float77", 4]]})
