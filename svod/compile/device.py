"""Devices: their names, and the pairs of renderer and compiler that make programs for them.

    CPU, CPU:0          LINEAR → LLVM IR → an object
    CPU:interpreter     LINEAR → itself, run instruction by instruction in NumPy: to find out who is at fault for a wrong number

A device has pairs of which one is selected, the first unless its name says otherwise. The number in a name (CUDA:1) says which of several
equal devices is meant: what is compiled is theirs together, so keys hold the base name only. Memory is `svod.core.graph.buffer`, what runs
programs is `svod.compile.plan.execution_plan`, for all pairs of a device.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from svod.compile.interpreted import InterpretedProgram, encode_linear, render_linear
from svod.compile.llvm.codegen import COMPILER, LoadedProgram, compile_object
from svod.compile.llvm.render import render
from svod.compile.lower.program import Program, ProgramSpec
from svod.core.machine.target import Target
from svod.errors import UnsupportedError


@dataclass(frozen=True)
class CompilerPair:
    """How a program gets source, its source code, and its code addresses: the steps that `svod.compile.plan.stages` takes. `key`: who
    does it; part of the key of what is kept on disk. Every step raises CompileError for what the one before cannot have made."""

    name: str
    key: str
    render: Callable[[Program, Target], str]
    compile: Callable[[str, Target], bytes]
    load: Callable[[bytes, ProgramSpec], LoadedProgram | InterpretedProgram]


@dataclass(frozen=True)
class Device:
    """`base`: the name without a number."""

    base: str
    pairs: tuple[CompilerPair, ...]
    selected: str = ""

    @property
    def pair(self) -> CompilerPair:
        """The pair that is selected; the first, if none is."""
        return next((p for p in self.pairs if p.name == self.selected), self.pairs[0])


LLVM = CompilerPair("llvm", COMPILER, render, lambda source, target: compile_object(source, target, passes=True),
                    lambda code, spec: LoadedProgram(code, [p.symbol for p in spec.phases]))
INTERPRETER = CompilerPair("interpreter", "LINEAR, interpreted", render_linear, encode_linear, InterpretedProgram)
_DEVICES = {"CPU": Device("CPU", (LLVM, INTERPRETER))}


def device_named(name: str) -> Device:
    """The device that a name means: 'CPU', 'cpu:0', 'CPU:interpreter'. Raises UnsupportedError for one that svod does not have."""
    base, _, rest = name.partition(":")
    found = _DEVICES.get(base.upper())
    names = "" if found is None else ", ".join(f"{found.base}:{p.name}" for p in found.pairs)
    if found is None:
        raise UnsupportedError(f"the device {name!r}: svod runs on the {', '.join(_DEVICES)} only; unset SVOD_DEVICE")
    if rest in ("", "0"):
        return found
    if rest.lower() not in (p.name for p in found.pairs):
        raise UnsupportedError(f"the device {name!r}: there is one {found.base}; use {found.base}, {names}")
    return Device(found.base, found.pairs, rest.lower())
