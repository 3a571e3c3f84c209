"""The records of the tuning database: plain, validated data, each named by a digest of its content.

A record has a JSON form (`to_json`, `from_json`), which travels between machines, and a row form (`to_row`, `from_row`), where nested
values are JSON text. Every field is checked. An invalid field raises `RecordError` with the reason, so that a reader can skip that record
and report it. Nothing read here is executed or unpickled.

Digest: blake2b-128 of the record's canonical JSON (sorted keys, no spaces, floats in the shortest form that gives the same bits), in
which fields that have their default are left out.

Fields come and go without a new format. A new field needs a default that means "unknown": a record without it has the same content and the
same digest in every version of svod. A field that this svod does not know is kept in `extra`, is part of the digest, and is exported again.
Records of format 1, whose digests also cover fields with default values, are read and get a digest of the current format.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from sys import float_info
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_origin, get_type_hints

from msgspec import Meta, Struct, defstruct
from msgspec.json import decode
from msgspec.structs import asdict

from svod.errors import DatabaseError
from svod.system.checked import checked

Chain = tuple[tuple[Any, ...], ...]

MAX_TEXT = 1 << 22  # most characters of one field; a longer text can only be a mistake


class RecordError(DatabaseError):
    """The error for an invalid record. Readers skip and report such a record."""


_write_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False, check_circular=False).encode


def canonical(value: Any, what: str = "the record") -> str:
    """The canonical JSON text of a value. Raises RecordError for NaN, infinities, and values that are not JSON."""
    try:
        return _write_canonical(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise RecordError(f"{what} is not JSON: {e}") from e


def digest(kind: str, content: Mapping[str, Any], version: int = 2) -> str:
    """The 32 hex digits that name a record of this kind with this content. Raises RecordError for text that is not Unicode."""
    try:
        text = f"svod-{kind}-{version}\n{canonical(content)}".encode()
    except UnicodeEncodeError as e:
        raise RecordError(f"a {kind} has text that is not Unicode: {e.reason}") from None
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises RecordError, also for NaN, infinities and nesting too deep to be a record."""
    try:
        return decode(text)
    except (ValueError, RecursionError) as e:
        raise RecordError(f"{what} is not JSON: {e}") from e


# -- the types of fields, as msgspec checks them -------------------------------------------------------------------------

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[float, Meta(ge=0, le=float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=float_info.max)]
Facts = Mapping[str, Any]
#: The outcome of a candidate. ok: measured; wrong: wrong numbers; timeout: over a deadline; crash: killed by a signal; error: an exception;
#: slow: its timing was stopped because it was far behind; lost: its worker was lost too often.
RecordedStatus = Literal["ok", "wrong", "timeout", "crash", "error", "slow", "lost"]
#: How a candidate was timed: alone (screen), against others of its round (race), against the heuristic at full size (confirm).
Step = Literal["screen", "race", "confirm"]


_Operand = int | str | None
#: A chain as nested tuples. An opt is (op name, axis name or None, argument); an argument is an integer, text, None or a list of these.
#: Whether the chain applies is decided by `apply_opt`.
ChainData = Annotated[tuple[Annotated[tuple[_Operand | tuple[_Operand, ...], ...], Meta(min_length=1, max_length=8)], ...],
                      Meta(max_length=1000)]


R = TypeVar("R", bound="Record")

#: Kind of record → its fields in format 1. Each has a column of its own in the database; later fields share the column `extra`.
RECORD_COLUMNS: dict[str, tuple[str, ...]] = {kind: tuple(names.split()) for kind, names in {
    "target": "target facts",
    "kernel": "kernel name ast ast_version structure flops bytes",
    "origin": "kernel origin",
    "search": "search kernel target strategy executor config svod by started_at ended_at outcome result",
    "measurement": "kernel target chain linear status codegen compiler protocol step reason time samples anchor baseline "
                   "baseline_linear ratio ratio_low ratio_high noisy search host taken_at",
    "verdict": "kernel target linear verdict codegen compiler by method reason search taken_at",
    "rounding": "kernel target plan weights chain linear codegen samples max_error error before after used plan_error plan_before "
                "plan_after taken_at",
    "form_times": "kernel target plan described lengths codegen compiler protocol direct transformed ratio ratio_low ratio_high "
                  "noisy taken_at",
    "plan_times": "kernel target described alternatives untried codegen compiler protocol by_rules otherwise ratio ratio_low ratio_high "
                  "noisy taken_at"}.items()}
MAX_EXTRA = 64      # most unknown fields of one record; more can only be a mistake


@cache
def _defaults(kind: str) -> dict[str, Any]:
    """Field → default, for all fields of this kind of record that have a default."""
    record = BY_KIND[kind]
    made = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(record)}
    return {name: value for name, value in made.items() if value is not MISSING and name != "extra"}


@cache
def _defaults_or_none(kind: str) -> tuple[tuple[str, Any], ...]:
    """Every field with its default, or with MISSING, which equals no value."""
    defaults = _defaults(kind)
    return tuple((name, defaults.get(name, MISSING)) for name in BY_KIND[kind].types)


@dataclass(frozen=True)
class Record:
    """Base of all records. The fields of a subclass, in order, are the fields of its JSON form. `json_fields`: the fields that are stored
    as JSON text where they have a column. `extra`: fields that another version of svod wrote and this one does not know."""

    extra: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    kind: ClassVar[str]
    table: ClassVar[str]
    json_fields: ClassVar[frozenset[str]] = frozenset()
    types: ClassVar[dict[str, Any]]         # type of each field, in order
    switches: ClassVar[frozenset[str]]      # the boolean fields, which are 0 or 1 in a row
    shape: ClassVar[type[Struct]]           # a msgspec structure with these types, which checks all fields at once

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls.types = {name: kind for name, kind in hints.items() if get_origin(kind) is not ClassVar and name != "extra"}
        cls.switches = frozenset(name for name, kind in cls.types.items() if kind is bool)
        cls.shape = defstruct(cls.__name__, [(name, ChainData if kind == Chain else kind) for name, kind in cls.types.items()])

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.types}
        for name in self.json_fields:       # nested values become lists and objects of JSON
            if self.types[name] != Chain:
                values[name] = parse_json(canonical(values[name], name), name)
        self._check(values)

    @classmethod
    def _of_json(cls: type[R], values: Mapping[str, Any], extra: Mapping[str, Any]) -> R:
        """The record with these values, which were parsed from JSON, so that nested values need no conversion. Raises RecordError."""
        record = object.__new__(cls)
        object.__setattr__(record, "extra", extra)
        record._check({**_defaults(cls.kind), **values})
        return record

    def _check(self, values: dict[str, Any]) -> None:
        """Set the fields to checked values. Raises RecordError."""
        self.__dict__.update(asdict(checked(values, self.shape, RecordError, self.kind)))
        if self.extra:
            extra = checked(parse_json(canonical(self.extra, "unknown fields"), "unknown fields"), dict[str, Any], RecordError)
            if len(extra) > MAX_EXTRA or extra.keys() & {*self.types, "kind", "id"}:
                raise RecordError(f"a {self.kind} has {len(extra)} unknown fields, or a known one among them")
            object.__setattr__(self, "extra", extra)

    @cached_property
    def id(self) -> str:
        """The digest of the record's content: its primary key."""
        return digest(self.kind, self.content())

    def content(self) -> dict[str, Any]:
        """The record's fields that differ from their defaults, and those unknown to this svod, as JSON values."""
        values = self.__dict__
        return {**self.extra, **{name: value for name, default in _defaults_or_none(self.kind) if (value := values[name]) != default}}

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "id": self.id, **self.content()}

    def to_row(self) -> dict[str, Any]:
        columns, values = RECORD_COLUMNS[self.kind], self.__dict__
        row = {name: canonical(values[name]) if name in self.json_fields else int(v) if (v := values[name]) is True or v is False else v
               for name in columns}
        later = {name: v for name, v in self.content().items() if name not in columns}
        return {"id": self.id, **row, "extra": canonical(later) if later else "{}"}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record in a JSON object. Raises RecordError for a missing or invalid field, and for an id that is not the digest."""
        missing = set(cls.types) - set(data) - set(_defaults(cls.kind))
        if missing:
            raise RecordError(f"a {cls.kind} lacks {', '.join(sorted(missing))}")
        extra = {name: value for name, value in data.items() if name not in cls.types and name not in ("kind", "id")}
        record = cls._of_json({name: data[name] for name in cls.types if name in data}, extra)
        record.check_id(data.get("id", record.id))
        return record

    def check_id(self, stored: Any) -> None:
        """Raise RecordError if the id stored with this record is neither its digest in the current format nor that in format 1."""
        columns = RECORD_COLUMNS[self.kind]
        if stored != self.id and (self.content().keys() - set(columns)
                                  or stored != digest(self.kind, {name: getattr(self, name) for name in columns}, version=1)):
            raise RecordError(f"{self.kind} {stored!r:.40} was altered: its content has the digest {self.id}")

    @classmethod
    def from_row(cls: type[R], row: Mapping[str, Any]) -> R:
        """The record in a database row. Raises RecordError for an invalid field. The id is not checked; for untrusted rows `check_id` does
        that."""
        values: dict[str, Any] = {name: row[name] for name in RECORD_COLUMNS[cls.kind]}
        for name in cls.json_fields & values.keys():
            text = values[name]
            values[name] = parse_json(text if isinstance(text, str) else checked(text, str, RecordError, name), name)
        for name in cls.switches:
            values[name] = bool(values[name]) if values[name] in (0, 1) else values[name]
        if row["extra"] == "{}":
            return cls._of_json(values, {})
        extra = checked(parse_json(checked(row["extra"], str, RecordError, "extra"), "extra"), dict[str, Any], RecordError, "extra")
        values.update({name: extra.pop(name) for name in cls.types if name in extra and name not in values})
        return cls._of_json(values, extra)


@dataclass(frozen=True)
class SizeTime:
    """The time of a kernel with variables at one size: the values of the variables, seconds of one run, ratio to the heuristic's time."""

    at: dict[str, Count]
    seconds: Positive
    ratio: Positive

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.at.items())

    def named(self, names: Mapping[str, str]) -> SizeTime:
        """The same time with the user's names of the variables. `names`: the kernel's names (v0, v1, …) → the user's."""
        return replace(self, at={names.get(name, name): value for name, value in self.at.items()})


Sizes = Annotated[tuple[SizeTime, ...], Meta(max_length=100)]


@dataclass(frozen=True)
class Measurement(Record):
    """The measurement of one candidate in one search.

    Times are seconds of one run at full size. `ratio` is candidate ÷ baseline, paired within the same run (below 1: faster), with its 95 %
    interval `ratio_low … ratio_high`. `baseline` is the heuristic's time in that run, `baseline_linear` its LINEAR digest. The heuristic
    itself is confirmed with the ratio 1 and the interval [1, 1]. `anchor` is the incumbent's time in the same batch. `codegen` is the
    revision of svod's code generator, `protocol` the revision of the timing rules. `host` holds facts that may explain a time (load, steal,
    governor…). `taken_at` is seconds since 1970. For a kernel with variables `time`, `samples` and `ratio` are geometric means over the
    sizes, which are in `host`, as are the names of the variables. `strategy` is CHECK or TRANSFER if the chain was not proposed by a search
    of this kernel, else "". `inside`: the digest of the plan inside which the chain and the heuristic's were timed; "" if the kernel was
    timed alone. If that plan was slower as a whole and no kernel stood out, the times are those of the plan."""

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
    strategy: Text = ""
    inside: Text = ""

    kind: ClassVar[str] = "measurement"
    table: ClassVar[str] = "measurements"
    json_fields: ClassVar[frozenset[str]] = frozenset({"chain", "samples", "host"})

    def _check(self, values: dict[str, Any]) -> None:
        super()._check(values)
        if not all(isinstance(opt[0], str) and opt[0] for opt in self.chain):
            raise RecordError("chain: an opt begins with its name, as in [op, axis, argument]")
        if "sizes" in self.host or "variables" in self.host:
            _ = self.sizes, self.variables              # both raise RecordError for invalid values

    @cached_property
    def sizes(self) -> tuple[SizeTime, ...]:
        """The sizes at which a kernel with variables was confirmed; () for one without."""
        sizes: tuple[SizeTime, ...] = checked(self.host.get("sizes", ()), Sizes, RecordError, "host: sizes")
        return sizes

    @cached_property
    def variables(self) -> dict[str, str]:
        """The names that the user gave to the kernel's variables (v0, v1, …) in the program that was tuned; {} where none are recorded."""
        names: dict[str, str] = checked(self.host.get("variables", {}), dict[str, str], RecordError, "host: variables")
        return names

    @cached_property
    def chain_key(self) -> str:
        """The chain as JSON text. It is used to break ties, and as the name of a candidate that has no LINEAR."""
        return canonical(self.chain)


@dataclass(frozen=True)
class Verdict(Record):
    """A judgement on one LINEAR of a kernel on a target: `verified`, `wrong`, `retracted` or `restored`.

    A wrong or retracted verdict holds for all measurements of that LINEAR up to the verdict's code generator revision; a later revision
    needs a new verification. A `restored` verdict revokes the records whose ids are in `lifts`. `by` is user@host or the name of a tool,
    `method` says how it was judged (oracle, inputs, bound)."""

    kernel: Name
    target: Name
    linear: Name
    verdict: Literal["verified", "wrong", "retracted", "restored"]
    codegen: Count
    compiler: Text = ""
    by: Text = ""
    method: Text = ""
    reason: Text = ""
    search: Text = ""
    taken_at: Number = 0.0
    lifts: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()

    kind: ClassVar[str] = "verdict"
    table: ClassVar[str] = "verdicts"


@dataclass(frozen=True)
class KernelRecord(Record):
    """The description of a kernel. `ast` is the kernel AST as JSON data, `structure` its key without extents, which it shares with related
    kernels, `flops` and `bytes` the operations and least memory traffic of one run. Of several descriptions of one kernel the one with the
    greatest `ast_version` is shown."""

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
    """The place in a model that a kernel comes from: a module path or the user's file:line."""

    kernel: Name
    origin: Text

    kind: ClassVar[str] = "origin"
    table: ClassVar[str] = "origins"


@dataclass(frozen=True)
class TargetFacts(Record):
    """Facts about the machines with this target key: model name, microcode, governor, OS, driver…"""

    target: Name
    facts: Facts = field(default_factory=dict)

    kind: ClassVar[str] = "target"
    table: ClassVar[str] = "targets"
    json_fields: ClassVar[frozenset[str]] = frozenset({"facts"})


#: Outcomes of searches that had more to try: the budget or Ctrl-C ended them, or an error.
BUDGET_SPENT, INTERRUPTED, FAILED = "budget spent", "interrupted", "failed"
#: Strategies that only measure given chains, winners of other machines (CHECK) or chains of related kernels (TRANSFER): no searches.
CHECK, TRANSFER = "check", "transfer"
#: The outcome of a search whose best chain is as fast as the machine allows: a wider search finds nothing better.
AT_BOUND = "at the roofline bound"


@dataclass(frozen=True)
class Search(Record):
    """One search of a kernel: its user, its settings and its end. `config` has the fields of BeamConfig, with the width and the budget that
    the user asked for; `result` has counts and times. `outcome` is BUDGET_SPENT, INTERRUPTED or FAILED if the search had more to try, else
    the reason why it ended. A search has one record from its start, without `ended_at`, and one from its end."""

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


@dataclass(frozen=True)
class Rounding(Record):
    """The effect of rounding the factors of one kernel in a plan, under the policy "fast" (`svod.tune.fast`); the records of one choice
    have the same `plan`, `weights` and `taken_at`.

    `plan`, `weights`: the digests of the plan, and of the constants it read. `chain`: the kernel's chain with rounded factors; `linear`:
    its LINEAR digest. `samples`: the sample inputs in words. Errors are the largest difference of an output from the float32 plan's, over
    the largest value of that output: `max_error`: the largest one that was allowed; `error`: that of the plan in which this kernel alone
    is rounded (None: infinite). `before`, `after`: seconds of this kernel in a run of the plan in float32, and rounded. `used`: whether the
    kernel is rounded in the plan that was chosen, whose error, and seconds of a run in float32 and as chosen, are `plan_error`,
    `plan_before` and `plan_after`."""

    kernel: Name
    target: Name
    plan: Name
    weights: Text
    chain: Chain
    linear: Text
    codegen: Count
    samples: Text = ""
    max_error: Number = 0.0
    error: Number | None = None
    before: Number = 0.0
    after: Number = 0.0
    used: bool = False
    plan_error: Number = 0.0
    plan_before: Number = 0.0
    plan_after: Number = 0.0
    taken_at: Number = 0.0

    kind: ClassVar[str] = "rounding"
    table: ClassVar[str] = "roundings"
    json_fields: ClassVar[frozenset[str]] = frozenset({"chain"})

    @property
    def choice(self) -> tuple[str, str, str, float]:
        """What the records of one choice have in common."""
        return self.target, self.plan, self.weights, self.taken_at


class PairTimes(Record):
    """Base of the records with the times of two ways to compute something, taken in the same rounds of whole plans. `kernel`: what is
    computed, which is no kernel but has its key in the place of one; `described`: it in words. `ratio` is the time of the second way over
    that of the first, with its 95 % interval. `codegen`, `compiler`, `protocol` and `noisy` are those of a `Measurement`."""

    kernel: Name
    target: Name
    described: Text
    codegen: Count
    compiler: Text
    protocol: Count
    ratio: Positive
    ratio_low: Number
    ratio_high: Positive
    noisy: bool
    taken_at: Number

    def _check(self, values: dict[str, Any]) -> None:
        super()._check(values)
        if not self.ratio_low <= self.ratio <= self.ratio_high:
            raise RecordError(f"the ratio {self.ratio:g} of two times is not in its interval {self.ratio_low:g} to {self.ratio_high:g}")

    @property
    def linear(self) -> str:
        """The second way, as a verdict names it in the place of a LINEAR digest."""
        raise NotImplementedError

    @property
    def is_faster(self) -> bool:
        """Whether the second way is the faster one, beyond noise."""
        return self.ratio_high < 1.0

    @property
    def is_decided(self) -> bool:
        """Whether one of the ways is the faster one, beyond noise."""
        return not self.ratio_low <= 1.0 <= self.ratio_high


@dataclass(frozen=True)
class FormTimes(PairTimes):
    """The times of a convolution's two forms inside a plan: directly, and by Fourier transforms (`svod.tune.plans.convolutions`).

    `kernel`: the key of the convolution, which needs several kernels in one of its forms. `plan`: the digest of the plan inside which both
    were timed, in its direct form. `lengths`: the positions of a block along each window axis. `direct`, `transformed`: seconds of a run of
    the plan with each form."""

    kernel: Name
    target: Name
    plan: Text
    described: Text
    lengths: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=8)]
    codegen: Count
    compiler: Text
    protocol: Count
    direct: Positive
    transformed: Positive
    ratio: Positive
    ratio_low: Number
    ratio_high: Positive
    noisy: bool = False
    taken_at: Number = 0.0

    kind: ClassVar[str] = "form_times"
    table: ClassVar[str] = "form_times"
    json_fields: ClassVar[frozenset[str]] = frozenset({"lengths"})

    @property
    def linear(self) -> str:
        return f"transforms of {'×'.join(map(str, self.lengths))}"


@dataclass(frozen=True)
class PlanTimes(PairTimes):
    """The times of a plan by the rules of the cut, and with some of its alternatives (`svod.tune.plans.alternatives`).

    `kernel`: the digest of the plan by the rules. `alternatives`: what the plan does otherwise, each with its key first; `untried`: how
    many alternatives the search had no time for. `by_rules`, `otherwise`: seconds of a run of each plan."""

    kernel: Name
    target: Name
    described: Text
    alternatives: Annotated[tuple[Name, ...], Meta(max_length=10_000)]
    untried: Count
    codegen: Count
    compiler: Text
    protocol: Count
    by_rules: Positive
    otherwise: Positive
    ratio: Positive
    ratio_low: Number
    ratio_high: Positive
    noisy: bool = False
    taken_at: Number = 0.0

    kind: ClassVar[str] = "plan_times"
    table: ClassVar[str] = "plan_times"
    json_fields: ClassVar[frozenset[str]] = frozenset({"alternatives"})

    @property
    def linear(self) -> str:
        return f"alternatives {' '.join(sorted(self.chosen))}"

    @property
    def chosen(self) -> frozenset[str]:
        """The keys of the alternatives."""
        return frozenset(a.partition(" ")[0] for a in self.alternatives)


def anonymised(record: Record) -> Record | None:
    """A copy of a record without names of people, machines, files, programs and searches; None for records that have nothing else. Of a
    measurement's `host` only the sizes of a kernel with variables stay. The copy and its original count as one measurement."""
    if isinstance(record, Measurement):
        return replace(record, search="", host={k: v for k, v in record.host.items() if k == "sizes"}, extra={})
    if isinstance(record, Verdict):
        return replace(record, by="", search="", extra={})
    if isinstance(record, Rounding):
        return replace(record, samples="", extra={})
    return replace(record, extra={}) if isinstance(record, (KernelRecord, PairTimes)) else None


def changed(records: Iterable[Record], change: Callable[[Record], Record | None]) -> list[Record]:
    """Apply `change` to each record, and drop the records for which it returns None. Ids are digests of contents, so they change as well:
    `lifts` of verdicts gets the new ids."""
    pairs = [(r, new) for r in records if (new := change(r)) is not None]
    digests = {old.id: new.id for old, new in pairs}
    return [replace(new, lifts=tuple(sorted(digests.get(i, i) for i in new.lifts))) if isinstance(new, Verdict) and new.lifts else new
            for _, new in pairs]


RECORDS: tuple[type[Record], ...] = (TargetFacts, KernelRecord, OriginRecord, Search, Measurement, Verdict, Rounding, FormTimes, PlanTimes)
PAIR_TIMES: tuple[type[PairTimes], ...] = (FormTimes, PlanTimes)
BY_KIND: dict[str, type[Record]] = {r.kind: r for r in RECORDS}


def record_from_json(data: Any) -> Record:
    """The record in a JSON object, whose `kind` says of which class it is. Raises RecordError."""
    if not isinstance(data, Mapping):
        raise RecordError(f"a record should be an object, found {data!r:.60}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in BY_KIND:
        raise RecordError(f"unknown kind of record: {kind!r:.40}; known: {', '.join(BY_KIND)}")
    return BY_KIND[kind].from_json(data)
