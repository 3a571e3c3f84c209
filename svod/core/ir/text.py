"""The readable text form of UOp graphs: `format_ast` writes it, `parse_ast` reads it back.

    %0 = PARAM float32 [Param(slot=0, size=35)]
    %1 = CONST index [7]
    %2 = RANGE index %1 [1]
    …
    %9 = STORE void %4, %8, %2
    %10 = SINK void %9

Each line has a node's number, operation, dtype and operands, and its argument in brackets if it has one. Operands are nodes of earlier
lines; the last line is the root. Text after `;` is a comment. An argument is written as

    1, -2, true, "text", none               as in JSON, except none, which JSON calls null
    1.0, 1e-05, inf, -inf, nan:7ff8…        floats; a NaN is written as its bits
    (1, "ADD"), (3,), ()                    tuples
    Param(slot=0, size=35), Dim(expr=%3)    dataclasses of `svod.core.ir.serialize.ARG_TYPES`; fields at their defaults are left out
    op:ADD, dtype:float32, %3, hex:00ff     operations, dtypes, nodes above, bytes

The text has the same content as the data of `svod.core.ir.serialize`, which also checks it: `parse_ast(format_ast(u)) is u`.
"""
from __future__ import annotations

import json
import math
import re
import struct
from typing import Any

from svod.core.ir.serialize import ARG_TYPES, GRAPH_FORMAT, ast_to_data, data_to_ast
from svod.core.ir.uop import UOp
from svod.errors import FormatError

_LINE = re.compile(r"%(\d+) = ([A-Z0-9_]+) ([a-z0-9_]+)((?: %\d+(?:, %\d+)*)?)(?: \[(.*)\])?")
_TOKEN = re.compile(r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<named>(?:nan|op|dtype|hex):[A-Za-z0-9_]*)
  | (?P<node>%\d+)
  | (?P<number>-?(?:inf\b|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))
  | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<mark>[(),=])
)""", re.VERBOSE)
_LITERALS: dict[str, Any] = {"none": None, "true": True, "false": False}


def format_ast(root: UOp) -> str:
    """Write `root` and all nodes below it as text, a line for each node. Equal graphs give equal text.

    Raises FormatError for an arg that has no stable form."""
    lines = []
    for n, (op, dtype, sources, arg) in enumerate(ast_to_data(root)["nodes"]):
        operands = " " + ", ".join(f"%{s}" for s in sources) if sources else ""
        lines.append(f"%{n} = {op} {dtype}{operands}" + ("" if arg is None else f" [{_show(arg)}]"))
    return "\n".join(lines)


def parse_ast(text: str) -> UOp:
    """Read a UOp from the text of `format_ast`. Raises FormatError, which names the line, for text that `format_ast` does not write."""
    rows: list[list[Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        content = _without_comment(line).strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise FormatError(f"line {number} is not a node, as in '%3 = ADD float32 %1, %2': {content:.100}")
        if int(match[1]) != len(rows):
            raise FormatError(f"line {number}: %{len(rows)} is the next node, found %{match[1]}; nodes are numbered from %0 in order")
        sources = [int(s) for s in re.findall(r"\d+", match[4])]
        rows.append([match[2], match[3], sources, None if match[5] is None else _Parser(match[5], number).parse()])
    return data_to_ast({"format": GRAPH_FORMAT, "nodes": rows})


def _show(arg: Any) -> str:
    """Write an arg, given as the data of `svod.core.ir.serialize`, as text."""
    if not isinstance(arg, list):
        return json.dumps(arg, ensure_ascii=False) if isinstance(arg, str) else "none" if arg is None else \
            str(arg).lower() if isinstance(arg, bool) else repr(arg)
    tag, *rest = arg
    if tag == "t":
        return f"({', '.join(map(_show, rest))}{',' if len(rest) == 1 else ''})"
    if tag == "f":
        value = struct.unpack(">d", bytes.fromhex(rest[0]))[0]
        return f"nan:{rest[0]}" if math.isnan(value) else repr(value)
    if tag == "c":
        return f"{rest[0]}({', '.join(f'{k}={_show(v)}' for k, v in rest[1].items())})"
    return f"%{rest[0]}" if tag == "u" else f"{ {'o': 'op', 'd': 'dtype', 'y': 'hex'}[tag]}:{rest[0]}"


def _without_comment(line: str) -> str:
    """Return a line up to its first `;` outside a string."""
    quoted = False
    at = 0
    while at < len(line):
        if quoted and line[at] == "\\":
            at += 1
        elif line[at] == '"':
            quoted = not quoted
        elif line[at] == ";" and not quoted:
            return line[:at]
        at += 1
    return line


class _Parser:
    """A recursive-descent parser of one arg: from its text to the data of `svod.core.ir.serialize`."""

    def __init__(self, text: str, line: int):
        self.line, self.text, self.at = line, text, 0

    def parse(self) -> Any:
        value = self.value()
        if self.text[self.at:].strip():
            raise self.wrong(f"{self.text[self.at:].strip()!r:.60} follows a complete argument")
        return value

    def wrong(self, what: str) -> FormatError:
        return FormatError(f"line {self.line}, argument [{self.text:.80}]: {what}")

    def take(self) -> tuple[str, str]:
        """Consume the next token; returns (kind, text)."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup is None:
            raise self.wrong(f"{self.text[self.at:].strip()!r:.40} cannot be read" if self.text[self.at:].strip() else "it ends too early")
        self.at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def next_is(self, mark: str) -> bool:
        """Whether the next token is `mark`; if so, it is consumed."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup != "mark" or match["mark"] != mark:
            return False
        self.at = match.end()
        return True

    def value(self, depth: int = 0) -> Any:
        if depth > 32:
            raise self.wrong("it is nested too deeply")
        kind, text = self.take()
        if kind == "string":
            try:
                return json.loads(text)
            except ValueError as e:
                raise self.wrong(f"{text:.60} is not a string as JSON has them: {e}") from None
        if kind == "number":
            return self.number(text)
        if kind == "node":
            return ["u", int(text[1:])]
        if kind == "named":
            name, content = text.split(":")
            return [{"nan": "f", "op": "o", "dtype": "d", "hex": "y"}[name], content]
        if text == "(":
            return ["t", *self.elements(depth)]
        if kind == "word" and text in _LITERALS:
            return _LITERALS[text]
        if kind == "word" and text in ARG_TYPES:
            return ["c", text, self.fields(depth)]
        raise self.wrong(f"{text!r} is not known here; known are {', '.join([*_LITERALS, *ARG_TYPES])}, numbers, strings and tuples")

    def number(self, text: str) -> Any:
        if "inf" in text or any(c in text for c in ".eE"):
            value = float(text)
            return value if math.isfinite(value) else ["f", struct.pack(">d", value).hex()]
        return int(text)

    def elements(self, depth: int) -> list[Any]:
        out: list[Any] = []
        while not self.next_is(")"):
            out.append(self.value(depth + 1))
            if not self.next_is(","):
                if not self.next_is(")"):
                    raise self.wrong("a ')' or ',' is missing")
                return out
        return out

    def fields(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if not self.next_is("("):
            raise self.wrong("a '(' is missing")
        while not self.next_is(")"):
            kind, name = self.take()
            if kind != "word" or name in out or not self.next_is("="):
                raise self.wrong(f"a field, as in 'size=35', is missing or given twice at {name!r}")
            out[name] = self.value(depth + 1)
            if not self.next_is(","):
                if not self.next_is(")"):
                    raise self.wrong("a ')' or ',' is missing")
                return out
        return out
