"""A program as a node to which the stages of compilation are added one by one; each is checked before the next is made from it.

    PROGRAM(SINK, DEVICE)                              a kernel AST, and the device it is for
    PROGRAM(SINK, DEVICE, LINEAR)                      lowered: arg of LINEAR is a Program
    PROGRAM(SINK, DEVICE, LINEAR, SOURCE)              rendered: arg of SOURCE is text
    PROGRAM(SINK, DEVICE, LINEAR, SOURCE, BINARY)      compiled: arg of BINARY is bytes, ready to be loaded

The ProgramSpec of a program follows from its SINK and from lowering. The arg of a PROGRAM is a ProgramSpec or None: its fields, unless
empty, override the derived ones. `svod.tune.chains` makes the code of plans this way. Stages from elsewhere (another LINEAR, an object file
of another compiler) can be put in their places, and `build` makes the missing ones. A search takes the same steps without the node: it
verifies each of its many candidates by running it.
"""
from __future__ import annotations

import dataclasses

from svod.compile.backend import CompilerPair, device_named
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program, ProgramSpec, derive_spec
from svod.compile.plan.plan_parts import LoadedCode
from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import ONCE
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import HOST, Target
from svod.errors import CompileError, KernelOptError

STAGES = (Ops.SINK, Ops.DEVICE, Ops.LINEAR, Ops.SOURCE, Ops.BINARY)
_ARGS = {Ops.DEVICE: str, Ops.LINEAR: Program, Ops.SOURCE: str, Ops.BINARY: bytes}
_STAGE_NAMES = {Ops.SINK: "sink stage", Ops.DEVICE: "device", Ops.LINEAR: "linear stage", Ops.SOURCE: "source stage",
                Ops.BINARY: "binary stage"}


def make_program(sink: UOp, device: str = HOST, explicit: ProgramSpec | None = None) -> UOp:
    """Make PROGRAM(SINK, DEVICE) of a kernel AST. Raises UnsupportedError for a device that svod does not have, and CompileError if the
    node is not a SINK."""
    device_named(device)
    program = UOp(Ops.PROGRAM, dtypes.void, (sink, UOp(Ops.DEVICE, dtypes.void, (), device)), explicit)
    stage_of(program, Ops.SINK)
    return program


def add_stage(program: UOp, op: Ops, content: Program | str | bytes) -> UOp:
    """Return the PROGRAM with its next stage. Raises CompileError if the stage is not the next one, or if `content` has the wrong type."""
    made = program.replace(src=(*program.src, UOp(op, dtypes.void, (), content)))
    for stage in STAGES[:STAGES.index(op) + 1]:
        stage_of(made, stage)
    return made


def stage_of(program: UOp, op: Ops) -> UOp:
    """Return a stage of a PROGRAM. Raises CompileError if the node is not a PROGRAM, or if the stage is missing or a different one."""
    if program.op is not Ops.PROGRAM:
        raise CompileError(f"expected PROGRAM op, got {program.op.value}; `make_program` makes one of a kernel")
    at = STAGES.index(op)
    if len(program.src) <= at:
        raise CompileError(f"PROGRAM missing {op.value} stage; `build` makes it")
    stage = program.src[at]
    if stage.op is not op:
        raise CompileError(f"PROGRAM {_STAGE_NAMES[op]} must be {op.value} op, got {stage.op.value}")
    if op is not Ops.SINK and not isinstance(stage.arg, _ARGS[op]):
        raise CompileError(f"PROGRAM {_STAGE_NAMES[op]} must hold {_ARGS[op].__name__}, got {type(stage.arg).__name__}")
    return stage


def spec_of(program: UOp, target: Target) -> ProgramSpec:
    """Return the ProgramSpec of a lowered PROGRAM. Raises CompileError for missing or wrong stages, and LaunchError for an impossible
    description or a launch that the target does not support."""
    sink, _, linear = (stage_of(program, op) for op in STAGES[:3])
    lowered: Program = linear.arg
    spec = _override(derive_spec(sink, target, lowered.spec.temps, lowered.spec.phases), program.arg)
    checked: set[ProgramSpec] = linear.cached("checked", lambda _: set())
    if spec not in checked:
        spec.check()
        validate(Program(spec, lowered.code))
        checked.add(spec)
    return spec


def _override(derived: ProgramSpec, explicit: ProgramSpec | None) -> ProgramSpec:
    """Return the derived description, overridden by the non-empty fields of `explicit`."""
    if explicit is None:
        return derived
    if not isinstance(explicit, ProgramSpec):
        raise CompileError(f"PROGRAM says {type(explicit).__name__} of itself; it must be a ProgramSpec or None")
    said = {f.name: getattr(explicit, f.name) for f in dataclasses.fields(explicit)}
    return dataclasses.replace(derived, **{name: value for name, value in said.items() if value not in ("", (), ONCE)})


def lower_kernel(kernel: Kernel, target: Target, chain: tuple[Opt, ...] = ()) -> Program:
    """Lower a kernel under a chain. Raises KernelOptError for a chain that does not apply."""
    if kernel.library_kernel is not None:
        if chain:
            raise KernelOptError(f"{chain[0].op} on a {kernel.library_kernel.arg[0].lower()}: a library kernel has one form and takes no "
                                 "opts")
        from svod.compile.lower.library import lower_library_kernel  # imported late: most models have no library kernel
        return lower_library_kernel(kernel, target)
    return lower(apply_opts(Scheduler(kernel, target), chain))


def build(program: UOp, target: Target, chain: tuple[Opt, ...] = ()) -> UOp:
    """Return the PROGRAM with all stages. Missing ones are made: LINEAR under a chain of opts, the others by the device's compiler pair.

    Raises the errors of the stages: KernelOptError, CompileError, LaunchError."""
    if len(program.src) == 2:
        program = add_stage(program, Ops.LINEAR, lower_kernel(Kernel(stage_of(program, Ops.SINK)), target, chain))
    program = rendered(program, target)
    if len(program.src) == 4:
        program = add_stage(program, Ops.BINARY, pair_of(program).compile(stage_of(program, Ops.SOURCE).arg, target))
    for op in STAGES:
        stage_of(program, op)
    return program


def rendered(program: UOp, target: Target) -> UOp:
    """Return a lowered PROGRAM with its SOURCE. Raises the errors of the stage, CompileError and LaunchError."""
    spec = spec_of(program, target)
    if len(program.src) == 3:
        program = add_stage(program, Ops.SOURCE, pair_of(program).render(Program(spec, stage_of(program, Ops.LINEAR).arg.code), target))
    return program


def load_program(program: UOp, target: Target) -> tuple[ProgramSpec, LoadedCode]:
    """Return the ProgramSpec and the loaded code of a PROGRAM with all stages. Raises CompileError for a missing stage or one of another
    device."""
    spec = spec_of(program, target)
    stage_of(program, Ops.SOURCE)
    return spec, pair_of(program).load(stage_of(program, Ops.BINARY).arg, spec)


def pair_of(program: UOp) -> CompilerPair:
    """Return the compiler pair of a PROGRAM's DEVICE."""
    stage_of(program, Ops.SINK)
    return device_named(stage_of(program, Ops.DEVICE).arg).pair
