"""LINEAR as text: JSON that keeps each type and value exactly. It is the source code of backends that interpret LINEAR."""
from __future__ import annotations

import json
from typing import Any

import numpy as np

from svod.compile.lower.linear import validate
from svod.compile.lower.program import Instruction, Program, ProgramSpec
from svod.core.ir.dtype import BY_NAME, DType
from svod.errors import CompileError


def render_linear(program: Program) -> str:
    """Return a program as text. Raises CompileError for code that LINEAR's grammar does not have."""
    validate(program)
    phases = [[_to_data(instr) for instr in code] for code in program.code]
    return json.dumps(phases, separators=(",", ":"))


def encode_linear(source: str) -> bytes:
    """Encode the text as bytes. Raises CompileError for text that is not LINEAR."""
    _read(source)
    return source.encode()


def decode_linear(code: bytes, spec: ProgramSpec) -> Program:
    """Return the program that `encode_linear` has encoded. Raises CompileError for other bytes, and if the number of phases differs from
    that of `spec`."""
    try:
        phases = _read(code.decode())
    except UnicodeDecodeError as error:
        raise CompileError(f"not LINEAR as text: {error}") from error
    if len(phases) != len(spec.phases):
        raise CompileError(f"the code has {len(phases)} phases, the program {spec.name} {len(spec.phases)}")
    program = Program(spec, phases)
    validate(program)
    return program


def _to_data(value: Any) -> Any:
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [_to_data(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _from_data(value: Any) -> Any:
    if isinstance(value, dict):
        return BY_NAME[value["dtype"]]
    return tuple([_from_data(v) for v in value]) if isinstance(value, list) else value


def _read(source: str) -> tuple[tuple[Instruction, ...], ...]:
    try:
        return tuple(tuple(_instruction(row) for row in code) for code in json.loads(source))
    except (ValueError, KeyError, TypeError) as error:
        raise CompileError(f"not LINEAR as text: {error}") from error


def _instruction(row: Any) -> Instruction:
    op, dtype, lanes, src, arg = map(_from_data, row)
    if not isinstance(op, str) or not isinstance(dtype, DType) or not isinstance(lanes, int) or not isinstance(src, tuple):
        raise ValueError(f"{row!r:.80} is no instruction")
    return Instruction(op, dtype, lanes, src, arg)
