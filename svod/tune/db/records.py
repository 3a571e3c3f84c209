"""The records of the tuning database: plain, validated data, each named by a digest of its content.

Every record has a JSON object form (`to_json`, `from_json`), which is what travels between machines, and a database row form
(`to_row`, `from_row`), where nested values are JSON text. Both directions check every field; what does not fit raises `RecordError`
with the reason, so that a reader can skip that record and report it. Nothing read here is ever executed or unpickled.

Digest: blake2b-128 of the record's canonical JSON (sorted keys, no spaces, floats in the shortest form that gives the same bits).
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar, NamedTuple, TypeVar

from svod.errors import DatabaseError

Chain = tuple[tuple[Any, ...], ...]

#: What became of a candidate: measured; computed wrong numbers; cut by a deadline; killed by a signal; raised; cut because it was far
#: behind; its worker vanished too often.
STATUSES = frozenset({"ok", "wrong", "timeout", "crash", "error", "slow", "lost"})
#: How well a candidate was timed: alone (screen), against its round (race), against the heuristic at full size (confirm).
STEPS = frozenset({"screen", "race", "confirm"})
VERDICTS = frozenset({"verified", "wrong", "retracted"})

MAX_TEXT = 1 << 22  # bytes of one field: a record that exceeds it is not evidence but an accident


class RecordError(DatabaseError):
    """A record that is not what it should be; it is skipped and reported."""


def canonical(value: Any) -> str:
    """The one JSON text of a JSON value. Raises RecordError for NaN and infinities."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as e:
        raise RecordError(f"not JSON: {e}") from e


def digest(kind: str, content: Mapping[str, Any]) -> str:
    """32 hex digits that name a record of this kind with this content."""
    return hashlib.blake2b(f"svod-{kind}-1\n{canonical(content)}".encode(), digest_size=16).hexdigest()


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises RecordError, also for NaN, infinities and nesting too deep to be a record."""
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not allowed")
    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as e:
        raise RecordError(f"{what} is not JSON: {e}") from e


# -- checks of single fields --------------------------------------------------------------------------------------------

def _text(v: Any, name: str, *, empty: bool = True) -> str:
    if not isinstance(v, str) or (not empty and not v):
        raise RecordError(f"{name} should be {'' if empty else 'non-empty '}text, found {v!r:.60}")
    if len(v) > MAX_TEXT:
        raise RecordError(f"{name} is longer than {MAX_TEXT} characters")
    return v


def _integer(v: Any, name: str) -> int:
    if not isinstance(v, int) or isinstance(v, bool) or not 0 <= v < 1 << 62:
        raise RecordError(f"{name} should be an integer ≥ 0, found {v!r:.60}")
    return v


def _number(v: Any, name: str) -> float:
    if not isinstance(v, (int, float)) or isinstance(v, bool) or not 0 <= v < inf:
        raise RecordError(f"{name} should be a finite number ≥ 0, found {v!r:.60}")
    return float(v)


def _maybe_number(v: Any, name: str) -> float | None:
    return None if v is None else _number(v, name)


def _switch(v: Any, name: str) -> bool:
    if v is not True and v is not False and not (isinstance(v, int) and v in (0, 1)):
        raise RecordError(f"{name} should be true or false, found {v!r:.60}")
    return bool(v)


def _member(v: Any, name: str, names: frozenset[str]) -> str:
    if not isinstance(v, str) or v not in names:
        raise RecordError(f"{name} should be one of {', '.join(sorted(names))}, found {v!r:.60}")
    return v


def _plain(v: Any, name: str) -> Any:
    """A JSON value whose tuples became lists."""
    if v is None or isinstance(v, (bool, int, str)):
        return v
    if isinstance(v, float):
        if v - v != 0.0:
            raise RecordError(f"{name} holds {v}")
        return v
    if isinstance(v, (list, tuple)):
        return [_plain(x, name) for x in v]
    if isinstance(v, Mapping) and all(isinstance(k, str) for k in v):
        return {k: _plain(x, name) for k, x in v.items()}
    raise RecordError(f"{name} holds a {type(v).__name__}, which is not plain data")


def _facts(v: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(v, Mapping):
        raise RecordError(f"{name} should be an object, found {v!r:.60}")
    plain: Mapping[str, Any] = _plain(v, name)
    return plain


def _host(v: Any, name: str) -> Mapping[str, Any]:
    """Facts, with the sizes of a kernel with variables among them, if there are any: [{"at": {variable: value}, "seconds", "ratio"}, …]."""
    facts = _facts(v, name)
    sizes = facts.get("sizes", [])
    if not isinstance(sizes, list) or len(sizes) > 100:
        raise RecordError(f"{name}: the sizes should be a list, found {sizes!r:.60}")
    for s in sizes:
        if not isinstance(s, dict) or s.keys() != {"at", "seconds", "ratio"} or not isinstance(s["at"], dict):
            raise RecordError(f"{name}: a size should say at, seconds and ratio, found {s!r:.60}")
        for at in s["at"].values():
            _integer(at, f"{name}: a variable")
        for what in ("seconds", "ratio"):
            if not _number(s[what], f"{name}: {what}"):
                raise RecordError(f"{name}: {what} of a size is 0")
    return facts


def _numbers(v: Any, name: str) -> tuple[float, ...]:
    if not isinstance(v, (list, tuple)):
        raise RecordError(f"{name} should be a list of numbers, found {v!r:.60}")
    return tuple(_number(x, name) for x in v)


def _freeze(v: Any) -> Any:
    return tuple(_freeze(x) for x in v) if isinstance(v, (list, tuple)) else v


def check_chain(v: Any, name: str = "chain") -> Chain:
    """A chain as nested tuples: each opt is (op name, axis name or None, argument), arguments are integers, text, None or lists of
    these. Whether it *applies* is for `apply_opt` to say."""
    if not isinstance(v, (list, tuple)) or len(v) > 1000:
        raise RecordError(f"{name} should be a list of opts, found {v!r:.60}")
    for opt in v:
        if not isinstance(opt, (list, tuple)) or not 1 <= len(opt) <= 8 or not isinstance(opt[0], str) or not opt[0]:
            raise RecordError(f"{name}: an opt should be [op, axis, argument], found {opt!r:.60}")
        for x in opt[1:]:
            items = x if isinstance(x, (list, tuple)) else (x,)
            if not all(i is None or isinstance(i, (int, str)) for i in items):
                raise RecordError(f"{name}: {opt!r:.60} holds something other than integers and names")
    chain: Chain = _freeze(v)
    return chain


R = TypeVar("R", bound="Record")


class Record:
    """What all records share. A subclass lists its fields in order with, for each, its check; JSON fields are text in a row."""

    kind: ClassVar[str]
    table: ClassVar[str]
    checks: ClassVar[Mapping[str, Any]]
    json_fields: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for name, check in self.checks.items():
            object.__setattr__(self, name, check(getattr(self, name), name))

    @cached_property
    def id(self) -> str:
        """The digest of the content: the primary key."""
        return digest(self.kind, self.content())

    def content(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {name: getattr(self, name) for name in self.checks}

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "id": self.id, **self.content()}

    def to_row(self) -> dict[str, Any]:
        row = {name: canonical(v) if name in self.json_fields else int(v) if isinstance(v, bool) else v
               for name, v in self.content().items()}
        return {"id": self.id, **row}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record in a JSON object. Raises RecordError for a missing, unknown or unfit field, and for an id that is not its digest."""
        extra = set(data) - set(cls.checks) - {"kind", "id"}
        missing = set(cls.checks) - set(data)
        if extra or missing:
            raise RecordError(f"a {cls.kind} " + " and ".join(
                [f"lacks {', '.join(sorted(missing))}"] * bool(missing) + [f"has unknown {', '.join(sorted(extra))}"] * bool(extra)))
        record = cls(**{name: data[name] for name in cls.checks})
        if "id" in data and data["id"] != record.id:
            raise RecordError(f"{cls.kind} {data['id']!r:.40} was altered: its content has the digest {record.id}")
        return record

    @classmethod
    def from_row(cls: type[R], row: Mapping[str, Any]) -> R:
        """The record in a database row (checked like a foreign one, except for the digest: see `from_foreign_row`)."""
        values = {name: parse_json(_text(row[name], name), name) if name in cls.json_fields else row[name] for name in cls.checks}
        return cls(**values)

    @classmethod
    def from_foreign_row(cls: type[R], row: Mapping[str, Any]) -> R:
        """The record in a row of somebody else's database: its id must be its digest."""
        record = cls.from_row(row)
        if row["id"] != record.id:
            raise RecordError(f"{cls.kind} {row['id']!r:.40} was altered: its content has the digest {record.id}")
        return record


class SizeTime(NamedTuple):
    """Values of the variables, seconds of one run with them, and how much of the heuristic's time that is."""

    at: Mapping[str, int]
    seconds: float
    ratio: float

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.at.items())


@dataclass(frozen=True)
class Measurement(Record):
    """What one candidate did in one search: evidence, never changed.

    Times are seconds of one run at full size. `ratio` is candidate ÷ baseline, paired within the same run (below 1: faster), with its
    95 % interval `ratio_low … ratio_high`; `baseline` is the heuristic's time in that run and `baseline_linear` its LINEAR digest.
    A confirmed heuristic is recorded too, with the ratio 1 and the interval [1, 1]: "nothing better was found" is a result.
    `anchor` is the incumbent's time around the batch. `codegen` is svod's code generator revision, `protocol` that of the timing
    rules. `host` holds what may explain a time (load, steal, governor…), `taken_at` is seconds since 1970.

    Of a kernel with variables `time`, `samples` and `ratio` are geometric means over `sizes`, which `host` holds as well.
    """

    kernel: str
    target: str
    chain: Chain
    linear: str
    status: str
    codegen: int
    compiler: str
    protocol: int
    step: str = "screen"
    reason: str = ""
    time: float | None = None
    samples: tuple[float, ...] = ()
    anchor: float | None = None
    baseline: float | None = None
    baseline_linear: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    noisy: bool = False
    search: str = ""
    host: Mapping[str, Any] = field(default_factory=dict)
    taken_at: float = 0.0

    kind: ClassVar[str] = "measurement"
    table: ClassVar[str] = "measurements"
    json_fields: ClassVar[frozenset[str]] = frozenset({"chain", "samples", "host"})
    checks: ClassVar[Mapping[str, Any]] = {
        "kernel": lambda v, n: _text(v, n, empty=False), "target": lambda v, n: _text(v, n, empty=False), "chain": check_chain,
        "linear": _text, "status": lambda v, n: _member(v, n, STATUSES), "codegen": _integer, "compiler": _text, "protocol": _integer,
        "step": lambda v, n: _member(v, n, STEPS), "reason": _text, "time": _maybe_number, "samples": _numbers,
        "anchor": _maybe_number, "baseline": _maybe_number, "baseline_linear": _text, "ratio": _maybe_number, "ratio_low": _maybe_number,
        "ratio_high": _maybe_number,
        "noisy": _switch, "search": _text, "host": _host, "taken_at": _number}

    @cached_property
    def sizes(self) -> tuple[SizeTime, ...]:
        """What a kernel with variables was confirmed at; () for one without."""
        return tuple(SizeTime(s["at"], s["seconds"], s["ratio"]) for s in self.host.get("sizes", ()))

    @cached_property
    def chain_text(self) -> str:
        """The chain as JSON: what ties are broken by."""
        return canonical(self.chain)


@dataclass(frozen=True)
class Verdict(Record):
    """What somebody found out about one LINEAR of a kernel on a target: `verified`, `wrong` or `retracted`.

    A wrong or retracted verdict holds for all measurements of that LINEAR up to its own code generator revision; a later revision
    needs new measurements and a new verification anyway. `by` is user@host or a tool's name, `method` how (oracle, inputs, bound).
    """

    kernel: str
    target: str
    linear: str
    verdict: str
    codegen: int
    compiler: str = ""
    by: str = ""
    method: str = ""
    reason: str = ""
    search: str = ""
    taken_at: float = 0.0

    kind: ClassVar[str] = "verdict"
    table: ClassVar[str] = "verdicts"
    checks: ClassVar[Mapping[str, Any]] = {
        "kernel": lambda v, n: _text(v, n, empty=False), "target": lambda v, n: _text(v, n, empty=False),
        "linear": lambda v, n: _text(v, n, empty=False), "verdict": lambda v, n: _member(v, n, VERDICTS), "codegen": _integer,
        "compiler": _text, "by": _text, "method": _text, "reason": _text, "search": _text, "taken_at": _number}


@dataclass(frozen=True)
class Kernel(Record):
    """What a kernel computes. `ast` is the kernel AST as JSON data, `structure` a key without extents (a family), `flops` and `bytes`
    the work and least traffic of one run. Two descriptions of one kernel (an older canonical form beside a newer) are both kept;
    the one with the greater `ast_version` is shown."""

    kernel: str
    name: str = ""
    ast: Any = None
    ast_version: int = 0
    structure: str = ""
    flops: float = 0.0
    bytes: float = 0.0

    kind: ClassVar[str] = "kernel"
    table: ClassVar[str] = "kernels"
    json_fields: ClassVar[frozenset[str]] = frozenset({"ast"})
    checks: ClassVar[Mapping[str, Any]] = {
        "kernel": lambda v, n: _text(v, n, empty=False), "name": _text, "ast": _plain, "ast_version": _integer, "structure": _text,
        "flops": _number, "bytes": _number}


@dataclass(frozen=True)
class Origin(Record):
    """Where in a model a kernel comes from: a module path or the user's file:line."""

    kernel: str
    origin: str

    kind: ClassVar[str] = "origin"
    table: ClassVar[str] = "origins"
    checks: ClassVar[Mapping[str, Any]] = {"kernel": lambda v, n: _text(v, n, empty=False), "origin": lambda v, n: _text(v, n, empty=False)}


@dataclass(frozen=True)
class TargetFacts(Record):
    """What is known about machines with this target key beyond the key: model name, microcode, governor, OS, driver…"""

    target: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    kind: ClassVar[str] = "target"
    table: ClassVar[str] = "targets"
    json_fields: ClassVar[frozenset[str]] = frozenset({"facts"})
    checks: ClassVar[Mapping[str, Any]] = {"target": lambda v, n: _text(v, n, empty=False), "facts": _facts}


@dataclass(frozen=True)
class Search(Record):
    """One finished search: who, with what, how it ended. `config` is the BeamConfig and the strategy, `result` counts and times."""

    search: str
    kernel: str
    target: str
    strategy: str = ""
    executor: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    svod: str = ""
    by: str = ""
    started_at: float = 0.0
    ended_at: float | None = None
    outcome: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)

    kind: ClassVar[str] = "search"
    table: ClassVar[str] = "searches"
    json_fields: ClassVar[frozenset[str]] = frozenset({"config", "result"})
    checks: ClassVar[Mapping[str, Any]] = {
        "search": lambda v, n: _text(v, n, empty=False), "kernel": lambda v, n: _text(v, n, empty=False),
        "target": lambda v, n: _text(v, n, empty=False), "strategy": _text, "executor": _text, "config": _facts, "svod": _text, "by": _text,
        "started_at": _number, "ended_at": _maybe_number, "outcome": _text, "result": _facts}


RECORDS: tuple[type[Record], ...] = (TargetFacts, Kernel, Origin, Search, Measurement, Verdict)
BY_KIND: dict[str, type[Record]] = {r.kind: r for r in RECORDS}


def record_from_json(data: Any) -> Record:
    """The record in a JSON object, of whatever kind. Raises RecordError."""
    if not isinstance(data, Mapping):
        raise RecordError(f"a record should be an object, found {data!r:.60}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in BY_KIND:
        raise RecordError(f"unknown kind of record: {kind!r:.40}; known: {', '.join(BY_KIND)}")
    return BY_KIND[kind].from_json(data)
