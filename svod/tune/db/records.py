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
from sys import float_info
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_origin, get_type_hints

from msgspec import Meta

from svod.errors import DatabaseError
from svod.system.checked import checked

Chain = tuple[tuple[Any, ...], ...]

MAX_TEXT = 1 << 22  # bytes of one field: a record that exceeds it is not evidence but an accident


class RecordError(DatabaseError):
    """A record that is not what it should be; it is skipped and reported."""


def canonical(value: Any, what: str = "the record") -> str:
    """The one JSON text of a JSON value. Raises RecordError for NaN and infinities."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as e:
        raise RecordError(f"{what} is not JSON: {e}") from e


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


# -- the types of fields: a value fits that msgspec converts to them ----------------------------------------------------

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[float, Meta(ge=0, le=float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=float_info.max)]
Facts = Mapping[str, Any]
#: What became of a candidate: measured; computed wrong numbers; cut by a deadline; killed by a signal; raised; cut because it was far
#: behind; its worker vanished too often.
RecordedStatus = Literal["ok", "wrong", "timeout", "crash", "error", "slow", "lost"]
#: How well a candidate was timed: alone (screen), against its round (race), against the heuristic at full size (confirm).
Step = Literal["screen", "race", "confirm"]


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
    """What all records share. The fields of a subclass, in order, are those of the JSON form; nested values are JSON text in a row."""

    kind: ClassVar[str]
    table: ClassVar[str]
    json_fields: ClassVar[frozenset[str]] = frozenset()
    types: ClassVar[dict[str, Any]]         # of the fields, in order

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls.types = {name: kind for name, kind in hints.items() if get_origin(kind) is not ClassVar}

    def __post_init__(self) -> None:
        for name, kind in self.types.items():
            value = getattr(self, name)
            if kind == Chain:
                value = check_chain(value, name)
            else:       # nested values become lists and objects of JSON, whatever they were made of
                value = checked(parse_json(canonical(value, name), name) if name in self.json_fields else value, kind, RecordError, name)
            object.__setattr__(self, name, value)

    @cached_property
    def id(self) -> str:
        """The digest of the content: the primary key."""
        return digest(self.kind, self.content())

    def content(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {name: getattr(self, name) for name in self.types}

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "id": self.id, **self.content()}

    def to_row(self) -> dict[str, Any]:
        row = {name: canonical(v) if name in self.json_fields else int(v) if isinstance(v, bool) else v
               for name, v in self.content().items()}
        return {"id": self.id, **row}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record in a JSON object. Raises RecordError for a missing, unknown or unfit field, and for an id that is not its digest."""
        extra = set(data) - set(cls.types) - {"kind", "id"}
        missing = set(cls.types) - set(data)
        if extra or missing:
            raise RecordError(f"a {cls.kind} " + " and ".join(
                [f"lacks {', '.join(sorted(missing))}"] * bool(missing) + [f"has unknown {', '.join(sorted(extra))}"] * bool(extra)))
        record = cls(**{name: data[name] for name in cls.types})
        if "id" in data and data["id"] != record.id:
            raise RecordError(f"{cls.kind} {data['id']!r:.40} was altered: its content has the digest {record.id}")
        return record

    @classmethod
    def from_row(cls: type[R], row: Mapping[str, Any]) -> R:
        """The record in a database row (checked like a foreign one, except for the digest: see `from_foreign_row`)."""
        values = {name: parse_json(checked(v, str, RecordError, name), name) if name in cls.json_fields
                  else bool(v) if kind is bool and v in (0, 1) else v for name, kind, v in ((n, k, row[n]) for n, k in cls.types.items())}
        return cls(**values)

    @classmethod
    def from_foreign_row(cls: type[R], row: Mapping[str, Any]) -> R:
        """The record in a row of somebody else's database: its id must be its digest."""
        record = cls.from_row(row)
        if row["id"] != record.id:
            raise RecordError(f"{cls.kind} {row['id']!r:.40} was altered: its content has the digest {record.id}")
        return record


@dataclass(frozen=True)
class SizeTime:
    """Values of the variables, seconds of one run with them, and how much of the heuristic's time that is."""

    at: dict[str, Count]
    seconds: Positive
    ratio: Positive

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.at.items())


Sizes = Annotated[tuple[SizeTime, ...], Meta(max_length=100)]


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

    kernel: Name
    target: Name
    chain: Chain
    linear: Text
    status: RecordedStatus
    codegen: Count
    compiler: Text
    protocol: Count
    step: Step = "screen"
    reason: Text = ""
    time: Number | None = None
    samples: tuple[Number, ...] = ()
    anchor: Number | None = None
    baseline: Number | None = None
    baseline_linear: Text = ""
    ratio: Number | None = None
    ratio_low: Number | None = None
    ratio_high: Number | None = None
    noisy: bool = False
    search: Text = ""
    host: Facts = field(default_factory=dict)
    taken_at: Number = 0.0

    kind: ClassVar[str] = "measurement"
    table: ClassVar[str] = "measurements"
    json_fields: ClassVar[frozenset[str]] = frozenset({"chain", "samples", "host"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sizes                              # raises where they do not fit

    @cached_property
    def sizes(self) -> tuple[SizeTime, ...]:
        """What a kernel with variables was confirmed at; () for one without."""
        sizes: tuple[SizeTime, ...] = checked(self.host.get("sizes", ()), Sizes, RecordError, "host: sizes")
        return sizes

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

    kernel: Name
    target: Name
    linear: Name
    verdict: Literal["verified", "wrong", "retracted"]
    codegen: Count
    compiler: Text = ""
    by: Text = ""
    method: Text = ""
    reason: Text = ""
    search: Text = ""
    taken_at: Number = 0.0

    kind: ClassVar[str] = "verdict"
    table: ClassVar[str] = "verdicts"


@dataclass(frozen=True)
class KernelRecord(Record):
    """What a kernel computes. `ast` is the kernel AST as JSON data, `structure` a key without extents (a family), `flops` and `bytes`
    the work and least traffic of one run. Two descriptions of one kernel (an older canonical form beside a newer) are both kept;
    the one with the greater `ast_version` is shown."""

    kernel: Name
    name: Text = ""
    ast: Any = None
    ast_version: Count = 0
    structure: Text = ""
    flops: Number = 0.0
    bytes: Number = 0.0

    kind: ClassVar[str] = "kernel"
    table: ClassVar[str] = "kernels"
    json_fields: ClassVar[frozenset[str]] = frozenset({"ast"})


@dataclass(frozen=True)
class OriginRecord(Record):
    """Where in a model a kernel comes from: a module path or the user's file:line."""

    kernel: Name
    origin: Text

    kind: ClassVar[str] = "origin"
    table: ClassVar[str] = "origins"


@dataclass(frozen=True)
class TargetFacts(Record):
    """What is known about machines with this target key beyond the key: model name, microcode, governor, OS, driver…"""

    target: Name
    facts: Facts = field(default_factory=dict)

    kind: ClassVar[str] = "target"
    table: ClassVar[str] = "targets"
    json_fields: ClassVar[frozenset[str]] = frozenset({"facts"})


@dataclass(frozen=True)
class Search(Record):
    """One finished search: who, with what, how it ended. `config` is the BeamConfig and the strategy, `result` counts and times."""

    search: Name
    kernel: Name
    target: Name
    strategy: Text = ""
    executor: Text = ""
    config: Facts = field(default_factory=dict)
    svod: Text = ""
    by: Text = ""
    started_at: Number = 0.0
    ended_at: Number | None = None
    outcome: Text = ""
    result: Facts = field(default_factory=dict)

    kind: ClassVar[str] = "search"
    table: ClassVar[str] = "searches"
    json_fields: ClassVar[frozenset[str]] = frozenset({"config", "result"})


RECORDS: tuple[type[Record], ...] = (TargetFacts, KernelRecord, OriginRecord, Search, Measurement, Verdict)
BY_KIND: dict[str, type[Record]] = {r.kind: r for r in RECORDS}


def record_from_json(data: Any) -> Record:
    """The record in a JSON object, of whatever kind. Raises RecordError."""
    if not isinstance(data, Mapping):
        raise RecordError(f"a record should be an object, found {data!r:.60}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in BY_KIND:
        raise RecordError(f"unknown kind of record: {kind!r:.40}; known: {', '.join(BY_KIND)}")
    return BY_KIND[kind].from_json(data)
