"""Lock files: the chains of one model as text, which is reviewed and committed together with the model's source.

    {"format": "svod-lock", "version": 2}
    {"chain": "UPCAST(o0, 8) LANES(o1.in)", "from": "fc", "gain": 1.3, "kernel": "1e0aeffe…", "name": "gemm", "target": "x86_64/…"}
    {"chain": "ROUND(out, bfloat16) …", "error": 1e-3, "kernel": "1e0aeffe…", "kind": "rounding", "name": "gemm", "plan": "77ab…", …}
    {"described": "float32 convolution of …", "direct": 2e-4, "kernel": "90c3…", "kind": "form_times", "lengths": [32, 32], …}

A line without a kind is a kernel's chain. One of the kind "rounding" belongs to a choice of kernels to round, under the policy "fast"; it
has the fields of the record `Rounding`, with its chain as text, and as `of` the number of lines of its choice: a choice that lost some is
not used. One of the kind "form_times" is the record `FormTimes` of a convolution, one of the kind "plan_times" the record `PlanTimes` of a
plan. Files without such lines have version 1.

`svod-tune -o model.lock.jsonl` writes a lock file; SVOD_LOCK and `PrepareConfig(lock=…)` name the file to use. A file may have lines of
several targets. It is data, never executed: a malformed line is skipped with a warning, and so is a whole file that is missing or not a
lock file; `svod-db bake` refuses them. A chain is replayed by `apply_opt`, which gives correct code or an error.
"""
from __future__ import annotations

import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from svod import config
from svod.core.kernel.chain_text import chain_text, parse_chain
from svod.core.kernel.scheduler import Opt
from svod.errors import ConfigError, SvodError
from svod.system.files import write_text
from svod.tune.db import PairTimes, Rounding
from svod.tune.db.records import PAIR_TIMES

log = logging.getLogger("svod.tune")

LOCK_FORMAT = "svod-lock"
LOCK_VERSION = 2
MOST_LOCK_BYTES = 64 << 20
MOST_CHAIN = 20_000         # most characters of one field; a chain of this length has more than a thousand opts

Chain = tuple[Opt, ...]


@dataclass(frozen=True)
class Locked:
    """A line of a lock file: the chain of a kernel on a target. `name`, `origin` and `gain` (over the heuristic, where it was measured) are
    information for readers."""

    kernel: str
    target: str
    chain: Chain
    name: str = ""
    origin: str = ""
    gain: float | None = None

    def to_json(self) -> dict[str, Any]:
        said = {"name": self.name, "from": self.origin, "gain": None if self.gain is None else round(self.gain, 3)}
        return {"kernel": self.kernel, "target": self.target, "chain": chain_text(self.chain), **{k: v for k, v in said.items() if v}}


@dataclass(frozen=True)
class LockedRounding:
    """A line of a lock file: whether a kernel is rounded in a plan. `name`: the kernel's, as information for readers. `of`: how many lines
    its choice has, as the file tells; 0: it does not."""

    record: Rounding
    name: str = ""
    of: int = field(default=0, compare=False)

    @property
    def kernel(self) -> str:
        return self.record.kernel

    @property
    def target(self) -> str:
        return self.record.target

    def to_json(self) -> dict[str, Any]:
        return {**self.record.content(), "kind": Rounding.kind, "chain": chain_text(self.record.chain),
                **({"name": self.name} if self.name else {}), **({"of": self.of} if self.of else {})}


@dataclass(frozen=True)
class LockedTimes:
    """A line of a lock file: the times of a convolution's forms, or of a plan with its alternatives."""

    record: PairTimes

    @property
    def kernel(self) -> str:
        return self.record.kernel

    @property
    def target(self) -> str:
        return self.record.target

    @property
    def name(self) -> str:
        return self.record.described

    def to_json(self) -> dict[str, Any]:
        return {**self.record.content(), "kind": self.record.kind}


class Lock(NamedTuple):
    """The lines of a lock file: chains by (kernel, target), the choices of kernels to round, and the times of convolutions and of plans."""

    chains: Mapping[tuple[str, str], Locked] = MappingProxyType({})
    roundings: Sequence[LockedRounding] = ()
    times: Sequence[LockedTimes] = ()

    @property
    def lines(self) -> tuple[Locked | LockedRounding | LockedTimes, ...]:
        return *self.chains.values(), *self.roundings, *self.times


def write_lock(path: Path, lines: Iterable[Locked], searched: Mapping[str, Collection[str]] | None = None,
               roundings: Iterable[LockedRounding] = (), times: Iterable[LockedTimes] = (),
               timed: Mapping[str, Collection[tuple[str, int]]] = MappingProxyType({})) -> int:
    """Write a lock file in a stable order, so that a diff shows only changes. `searched`: target → keys of the kernels that were to be
    tuned for it. A line of an existing file is kept if its target is not in `searched`, or if its kernel was to be tuned and has no new
    line; a choice of kernels to round, if all of its kernels were and its plan has no new choice; the times of a convolution or
    of a plan, if it has no new ones and is one of `timed`, (key, code generator) of those of the model by target, or its target has none.
    With `searched` None no old line is kept. Returns the number of lines with chains. Raises OSError."""
    lines, roundings, times = list(lines), list(roundings), list(times)
    if searched is not None and path.is_file():
        kept = _kept(read_lock(path), lines, roundings, times, searched, timed)
        lines, roundings, times = [*lines, *kept.chains.values()], [*roundings, *kept.roundings], [*times, *kept.times]
    ordered = sorted(lines, key=lambda x: (x.name, x.origin, x.kernel, x.target))
    rounded = sorted(roundings, key=lambda x: (x.name, x.kernel, x.record.choice))
    counts = Counter(x.record.choice for x in rounded)
    rounded = [replace(x, of=counts[x.record.choice]) for x in rounded]
    times = sorted(times, key=lambda x: (x.name, x.kernel, x.target))
    header = {"format": LOCK_FORMAT, "version": LOCK_VERSION if rounded or times else 1}
    text = [header, *(x.to_json() for x in ordered), *(x.to_json() for x in rounded), *(x.to_json() for x in times)]
    write_text(path, "".join(json.dumps(x, sort_keys=True, ensure_ascii=False) + "\n" for x in text))
    return len(ordered)


def _kept(old: Lock, lines: Sequence[Locked], roundings: Sequence[LockedRounding], times: Sequence[LockedTimes],
          searched: Mapping[str, Collection[str]], timed: Mapping[str, Collection[tuple[str, int]]]) -> Lock:
    """The lines of an existing file that `write_lock` keeps beside the new ones."""
    new, again = ({(x.kernel, x.target) for x in group} for group in (lines, times))
    chosen = {(x.target, x.record.plan) for x in roundings}
    gone = {x.record.choice for x in old.roundings if x.target in searched and x.kernel not in searched[x.target]}
    return Lock({at: x for at, x in old.chains.items() if at not in new and (x.target not in searched or x.kernel in searched[x.target])},
                [x for x in old.roundings if (x.target, x.record.plan) not in chosen and x.record.choice not in gone],
                [x for x in old.times if (x.kernel, x.target) not in again
                 and (x.target not in timed or (x.kernel, x.record.codegen) in timed[x.target])])


def check_replaceable(path: Path) -> None:
    """Raise ConfigError if `path` has content that this svod cannot read as a lock file, such as one of a newer version, which `write_lock`
    would destroy."""
    if path.is_file() and path.stat().st_size:
        with path.open(encoding="utf-8", errors="replace") as f:
            try:
                _check_header(f.readline(MOST_CHAIN))
            except ValueError as e:
                raise ConfigError(f"the lock file {path} would be lost: {e}") from e


def locked_lines(path: str | os.PathLike[str]) -> Mapping[tuple[str, str], Locked]:
    """The chains of a lock file by (kernel, target), read by `read_lock`."""
    return read_lock(path).chains


def read_lock(path: str | os.PathLike[str]) -> Lock:
    """The lines of a lock file. Raises nothing: a file or line that cannot be used is reported once, as a warning."""
    if problem := problem_of_lock(path):
        config.log_once(log, logging.WARNING, problem)
    return _lock_and_problem(path)[0]


def problem_of_lock(path: str | os.PathLike[str]) -> str:
    """What is wrong with a lock file, in words, and whether what can be read of it is used; "" if nothing is."""
    lock, problem = _lock_and_problem(path)
    return f"{problem}; what can be read of it is used" if problem and lock.lines else problem


def check_whole(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a lock file that cannot be used, or of which a line cannot be."""
    _, problem = _lock_and_problem(path)
    if problem:
        raise ConfigError(problem)


def _lock_and_problem(path: str | os.PathLike[str]) -> tuple[Lock, str]:
    """The lines of a lock file that can be used, and in words what is wrong with the file, or ""."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no file")       # reading a pipe might never end
        return _read(os.fspath(path), status.st_mtime_ns, status.st_size)
    except (OSError, ValueError) as e:      # ValueError: a null character in the path
        return Lock(), f"the lock file {path} cannot be read and is not used: {e}"


@lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> tuple[Lock, str]:
    """Parse a lock file, as `_lock_and_problem` returns it; cached by path, modification time (`changed`, ns) and size. Raises OSError."""
    if size > MOST_LOCK_BYTES:
        return Lock(), f"the lock file {path} has {size >> 20} MiB and is not used; {MOST_LOCK_BYTES >> 20} are read"
    header, *rest = Path(path).read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    try:
        _check_header(header)
    except ValueError as e:
        return Lock(), f"the lock file {path} is not used: {e}"
    lines: dict[tuple[str, str], Locked] = {}
    roundings: list[LockedRounding] = []
    times: list[LockedTimes] = []
    problems: list[str] = []
    for number, text in enumerate(rest, 2):
        try:
            if text.strip():
                line = _parsed(json.loads(text))
                if isinstance(line, LockedRounding):
                    roundings.append(line)
                elif isinstance(line, LockedTimes):
                    times.append(line)
                else:
                    lines[line.kernel, line.target] = line
        except (ValueError, RecursionError, SvodError) as e:
            problems.append(f"line {number}: {e!s:.200}")
    whole, gaps = _whole_choices(roundings)
    problems += gaps
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return Lock(lines, tuple(whole), tuple(times)), f"the lock file {path}: {problems[0]}{more}" if problems else ""


def _whole_choices(roundings: Sequence[LockedRounding]) -> tuple[list[LockedRounding], list[str]]:
    """The lines of the choices of which no line is missing, and in words what the others lack. A part of a choice is not used: its error
    was measured with all of its kernels."""
    have, told = Counter(choice for choice, _ in {(x.record.choice, x.kernel) for x in roundings}), dict[tuple[str, str, str, float], int]()
    for x in roundings:
        told[x.record.choice] = max(told.get(x.record.choice, 0), x.of)
    gaps = [f"{have[choice]} of {of} lines are there of the choice of kernels to round for plan {choice[1][:12]}, which is not used; "
            "restore the file, or choose again with svod-tune --numerics fast --max-error E"
            for choice, of in told.items() if have[choice] < of]
    return [x for x in roundings if have[x.record.choice] >= told[x.record.choice]], gaps


def _parsed(data: Any) -> Locked | LockedRounding | LockedTimes:
    """Check the parsed JSON of a line and return it. Raises ValueError, SvodError."""
    for record in PAIR_TIMES:
        if isinstance(data, dict) and data.get("kind") == record.kind:
            return LockedTimes(record.from_json(data))
    chain, gain = parse_chain(_text(data, "chain")), data.get("gain")
    name, origin = (x if isinstance(x := data.get(field), str) else "" for field in ("name", "from"))
    kind = data.get("kind")
    if kind == Rounding.kind:
        fields, of = {k: v for k, v in data.items() if k not in ("name", "of")}, data.get("of", 0)
        if not isinstance(of, int) or of < 0:
            raise ValueError(f"of should be a number of lines, found {of!r:.40}")
        return LockedRounding(Rounding.from_json({**fields, "chain": [o.to_json() for o in chain]}), name, of)
    if kind is not None:
        raise ValueError(f"it is of the unknown kind {kind!r:.40}")
    return Locked(_text(data, "kernel"), _text(data, "target"), chain, name, origin,
                  gain if isinstance(gain, (int, float)) and not isinstance(gain, bool) else None)


def _check_header(line: str) -> None:
    """Raise ValueError if `line` is not the first line of a lock file that this svod can read."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != LOCK_FORMAT:
        raise ValueError(f'{"this is no lock file of svod, which" if line else "it is empty; a lock file"} begins with '
                         f'{{"format": "{LOCK_FORMAT}", …}}')
    version = data.get("version")
    if not isinstance(version, int) or not 1 <= version <= LOCK_VERSION:
        raise ValueError(f"it has version {version!r:.20}, this svod reads up to {LOCK_VERSION}; update svod")


def _text(data: Any, name: str) -> str:
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{name} should be text, found {value!r:.40}")
    if len(value) > MOST_CHAIN:
        raise ValueError(f"its {name} has {len(value)} characters; {MOST_CHAIN} are read")
    return value
