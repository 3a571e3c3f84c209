"""Runs whole programs by the interpreter of LINEAR, in parts, and with memory that starts with poison."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from svod.compile.lower.interpreter import PhaseInterpreter, poison
from svod.compile.lower.program import Program
from svod.core.ir.dtype import to_numpy
from svod.core.spec.values import Array
from svod.errors import LaunchError

Slices = Sequence[Sequence[tuple[int, int]]]


def interpret(program: Program, args: Sequence[Array], variables: Mapping[str, int] | None = None,
              slices: Slices | int | None = None) -> None:
    """Runs the phases in order over `args`: flat arrays in memory form by slot, outputs written in place.

    `slices`: what parts of each phase run, in which order: None, everything at once; a number, that many equal parts, last part
    first (what is right does not depend on the order); or, per phase, (begin, end) pairs. Every part gets newly poisoned scratch, as
    from another worker. Raises LaunchError for arguments or variables that do not fit, CompileError for an access out of bounds."""
    spec = program.spec
    if len(args) != len(spec.params):
        raise LaunchError(f"{spec.name} takes {len(spec.params)} arguments, got {len(args)}")
    for slot, (array, (dtype, size)) in enumerate(zip(args, spec.params, strict=True)):
        if array.dtype != to_numpy(dtype) or array.ndim != 1 or array.size < size or not array.flags.c_contiguous:
            raise LaunchError(f"argument {slot} of {spec.name} is a flat array of {size} {to_numpy(dtype)}, "
                              f"got {array.shape} of {array.dtype}")
    missing = [name for name in spec.variables if name not in (variables or {})]
    if missing:
        raise LaunchError(f"{spec.name} needs the variables {missing}")
    temps = poisoned_temporaries(program)
    with np.errstate(all="ignore"):
        for k, (phase, code) in enumerate(zip(spec.phases, program.code, strict=True)):
            run = PhaseInterpreter(spec, phase, code, args, temps, variables or {})
            for begin, end in _parts(phase.extent_at(variables or {}), slices if slices is None or isinstance(slices, int) else slices[k]):
                run(begin, end)


def poisoned_temporaries(program: Program) -> list[Array]:
    """The temporaries of a program, filled with values that no code may rely on."""
    temps = [np.full(n, 0xA5, np.uint8) for n in program.spec.temps]
    for code in reversed(program.code):                     # in reverse, so that the first use decides the type of the poison
        for op, dtype, _, _, arg in code:
            if op == "TEMP":
                poison(temps[arg], dtype)
    return temps


def _parts(extent: int, slices: Sequence[tuple[int, int]] | int | None) -> Sequence[tuple[int, int]]:
    if slices is None:
        return [(0, extent)]
    if isinstance(slices, int):
        return [(extent * n // slices, extent * (n + 1) // slices) for n in reversed(range(slices))]
    return slices
