"""`TuningDB`, the interface through which the rest of svod reads the tuning database and adds records to it.

Its files are in `storage.py`, claims in `claims.py`, exports and merges in `moving.py`.

Guarantees
* Records are only added, never changed. Adding one twice is adding it once. `record` stores all of its records or none.
* Many processes and threads may use one database at once. A writer waits up to 30 s for its turn. A handle survives a fork: the child
  opens its own connections.
* A database that cannot be opened, read or written never stops a search or a `prepare`. All layers that can be read are read. New
  records are kept in memory, and `storage.store_again` and `close` try again to write them. `problem` holds the reason, which is
  logged once.
* Records are validated when they are read: an invalid one is skipped, listed in `skipped`, and logged once per file.
* A look-up never creates a file and never imports sqlite-utils, which only the creation of tables needs.

Only the process that drives a search writes. Workers never open the database.

The layers that a method reads:
* Methods that find chains of a kernel to use or to try (`ranking`, `winner`, `barred`, `family`, `targets_of`) read *all layers*.
* Methods that list or count records (`select`, `tally`), and `moving.py`, which exports them, read only the *user's records*, without the
  records that ship with svod. With `shipped=True` `select` reads these as well, for questions about a kernel whose chain may come from
  there.
* `all_rankings` returns the kernels of the user's records, each with the chains that `ranking` returns for it.
"""
from __future__ import annotations

import os
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from svod.errors import DatabaseError
from svod.system.process.program import user_at_host
from svod.tune.db import layers
from svod.tune.db.claims import Claims
from svod.tune.db.records import PAIR_TIMES, KernelRecord, Measurement, OriginRecord, PairTimes, Record, Rounding, Search, Verdict
from svod.tune.db.schema import OWN, SHIPPED, insert_rows, insert_values
from svod.tune.db.storage import Storage
from svod.tune.db.transfer import Skipped
from svod.tune.db.winners import Winner, barred_revisions, rank_winners, standing_bars

if TYPE_CHECKING:
    from typing import Self

R = TypeVar("R", bound=Record)

TRIED = 2                   # a candidate that has failed in this many searches is not tried again
#: (status, step) of a measurement → rank; among measurements of one LINEAR digest the lowest rank is the most informative.
_TELLING = {("wrong", ""): 0, ("ok", "confirm"): 1, ("ok", "race"): 2, ("ok", "screen"): 3, ("slow", ""): 4, ("crash", ""): 5,
            ("timeout", ""): 6, ("error", ""): 7}


class TuningDB:
    """An open tuning database: the file that is written and all layers that are read. A context manager, made by `TuningDB.open`."""

    def __init__(self, plan: layers.DatabasePaths, *, fresh: bool, read_only: bool) -> None:
        self.storage = Storage(plan, fresh=fresh, read_only=read_only)
        self.claims = Claims(self.storage)
        self._searches: dict[str, Search] = {}
        self._memo: dict[tuple[str, str], list[Winner]] = {}
        self._memo_version: tuple[int, ...] = ()

    @classmethod
    def open(cls, spec: str | os.PathLike[str] | None = None, fresh: bool = False, read_only: bool = False) -> TuningDB:
        """Open the database that `spec` names (`PrepareConfig.db`, SVOD_TUNE_DB; None: the user's data directory; `:none:`: memory only).

        `fresh`: read only the records that are added through this handle; they are stored as well. `read_only`: write no file.
        Never raises for a database that is missing, damaged, foreign, newer, or not accessible: `problem` then has the reason."""
        return cls(layers.resolve(None if spec is None else os.fspath(spec)), fresh=fresh, read_only=read_only)

    @property
    def plan(self) -> layers.DatabasePaths:
        """The files that the database consists of."""
        return self.storage.plan

    @property
    def path(self) -> Path | None:
        """The file that records are written to, whether or not it exists yet; None: records are only kept in memory."""
        return self.storage.path

    @property
    def problem(self) -> str | None:
        """The first reason why a file cannot be used, or None."""
        return self.storage.problem

    @property
    def skipped(self) -> list[Skipped]:
        """The records and files that could not be read."""
        return self.storage.skipped

    # -- looking up ---------------------------------------------------------------------------------------------------------
    def ranking(self, kernel: str, target: str) -> list[Winner]:
        """All chains that may be used for this kernel and target, best first, by the rules of `winners.py`."""
        with self.storage.lock:
            versions = self.storage.each(self.storage.all_layers(), lambda layer: layer.version())
            version = self.storage.changes, *versions
            if version != self._memo_version:
                self._memo.clear()
                self._memo_version = version
            if (kernel, target) not in self._memo:
                ranks: dict[str, int] = {}
                measurements: list[Measurement] = []
                verdicts: list[Verdict] = []
                for of_layer, verdicts_of_layer in self._deciding(kernel, target):
                    for m, rank in of_layer:
                        ranks[m.id] = min(rank, ranks.get(m.id, SHIPPED))
                        measurements.append(m)
                    verdicts += verdicts_of_layer
                self._memo[kernel, target] = rank_winners(measurements, verdicts, ranks)
            return self._memo[kernel, target]

    def _deciding(self, kernel: str, target: str) -> list[layers.Deciding]:
        return self.storage.each(self.storage.all_layers(), lambda layer: layer.deciding(kernel, target))

    def all_rankings(self, *, alone: bool = False) -> dict[tuple[str, str], list[Winner]]:
        """The `ranking` of each (kernel, target) that the user's records have measurements of. `alone`: rank by the user's records
        alone, without those that ship with svod."""
        with self.storage.lock:
            ranks: dict[str, int] = {}
            places: dict[tuple[str, str], tuple[list[Measurement], list[Verdict]]] = {}
            for of_layer, verdicts in self.storage.each(self.storage.users_layers(), lambda layer: layer.all_deciding()):
                for m, rank in of_layer:
                    ranks[m.id] = min(rank, ranks.get(m.id, SHIPPED))
                    places.setdefault((m.kernel, m.target), ([], []))[0].append(m)
                for v in verdicts:
                    places.setdefault((v.kernel, v.target), ([], []))[1].append(v)
            others = [] if alone else self.storage.shipped_layers()
            shipped = self.storage.each(others, lambda layer: layer.tally(Measurement, ("kernel", "target")))
            shared = {(kernel, target) for of_layer in shipped for kernel, target in of_layer}
            return {place: self.ranking(*place) if place in shared else rank_winners(*evidence, ranks)
                    for place, evidence in places.items()}

    def tally(self, record: type[Record], *columns: str) -> Counter[tuple[Any, ...]]:
        """Count the user's records of one kind by their values in these columns. A record in several layers counts once. Invalid rows may
        count more than once."""
        with self.storage.lock:
            of = self.storage.users_layers()
            nearest, seen = next(iter(of), None), set[str]()

            def ask(layer: layers.Layer) -> Counter[tuple[Any, ...]]:
                if layer is nearest:        # usually the largest layer by far: SQLite counts its rows without reading the records
                    return layer.tally(record, columns)
                new = [r for r, _ in layer.select(record, None, None) if r.id not in seen and not (nearest and nearest.has(r))]
                seen.update(r.id for r in new)
                return Counter(tuple(getattr(r, c) for c in columns) for r in new)
            return sum(self.storage.each(of, ask), Counter[tuple[Any, ...]]())

    def winner(self, kernel: str, target: str) -> Winner | None:
        """The chain to use, or None. If the chain gives another LINEAR digest today than `Winner.linear`, it is only a seed."""
        return next(iter(self.ranking(kernel, target)), None)

    def barred(self, kernel: str, target: str) -> dict[str, int]:
        """LINEAR digest → the last code generator revision under which it may not be used, by the records of all layers."""
        with self.storage.lock:
            evidence = self._deciding(kernel, target)
            return barred_revisions((m for of_layer, _ in evidence for m, _ in of_layer), (v for _, verdicts in evidence for v in verdicts))

    def known_digests(self, kernel: str, target: str, codegen: int | None = None, compiler: str | None = None,
                      protocol: int | None = None) -> dict[str, Measurement]:
        """LINEAR digest → the most informative measurement by this database's own searches, for candidates that need not be compiled or
        timed again. `codegen`, `compiler` and `protocol` select one code generator, compiler and timing protocol. Candidates whose worker
        was lost are left out, and so are candidates that were measured only on other machines. A crash, a time-out or an error may have
        been the machine's fault: such a candidate is included once it has failed in two searches."""
        ranks, best = dict[str, tuple[int, float, str]](), dict[str, Measurement]()
        failed: dict[str, set[str]] = {}        # LINEAR digest → the searches in which it crashed, timed out or raised an error
        for m, layer in self.select(Measurement, kernel, target):
            if layer != OWN or not m.linear or m.status == "lost" or (codegen is not None and m.codegen != codegen) \
                    or (compiler is not None and m.compiler != compiler) or (protocol is not None and m.protocol != protocol):
                continue
            if m.status in ("crash", "timeout", "error"):
                failed.setdefault(m.linear, set()).add(m.search)
                if len(failed[m.linear]) < TRIED:
                    continue
            rank = (_TELLING[m.status, m.step if m.status == "ok" else ""], -m.taken_at, m.id)
            if m.linear not in best or rank < ranks[m.linear]:
                ranks[m.linear], best[m.linear] = rank, m
        return best

    def select(self, record: type[R], kernel: str | None = None, target: str | None = None, *, plan: str | None = None,
               shipped: bool = False) -> list[tuple[R, int]]:
        """The user's records of one kind, of one kernel, target and plan if these are given, each with the rank of the nearest layer that
        holds it, in the order of their digests. `shipped`: include the records that ship with svod."""
        with self.storage.lock:
            of = self.storage.all_layers() if shipped else self.storage.users_layers()
            selected = chain.from_iterable(self.storage.each(of, lambda layer: list(layer.select(record, kernel, target, plan))))
            nearest = {r.id: (r, rank) for r, rank in sorted(selected, key=lambda pair: -pair[1])}     # of equal ids the last stays
            return [nearest[i] for i in sorted(nearest)]

    def pair_times(self, kernel: str | None = None, target: str | None = None, *, shipped: bool = False) -> list[tuple[PairTimes, int]]:
        """The user's times of two ways of each kind, as `select` gives them."""
        return [pair for kind in PAIR_TIMES for pair in self.select(kind, kernel, target, shipped=shipped)]

    def tried_here(self, kernel: str, target: str, codegen: int) -> set[str]:
        """The LINEAR digests that were measured by this database's own searches with a code generator revision, whatever the result was.
        Measurements that ended because a worker was lost do not count."""
        return {m.linear for m, layer in self.select(Measurement, kernel, target)
                if layer == OWN and m.codegen == codegen and m.status != "lost"}

    def family(self, structure: str, *, shipped: bool = True) -> list[KernelRecord]:
        """The descriptions of the kernels with a structure (`svod.core.schedule.family`), in the order of their digests. `shipped`: include
        kernels that only ship with svod."""
        with self.storage.lock:
            of = self.storage.all_layers() if shipped else self.storage.users_layers()
            found = {k.id: k for of_layer in self.storage.each(of, lambda layer: list(layer.family(structure))) for k in of_layer}
            return [found[i] for i in sorted(found)]

    def targets_of(self, kernel: str) -> list[str]:
        """The targets that a kernel was confirmed on."""
        with self.storage.lock:
            found = self.storage.each(self.storage.all_layers(), lambda layer: list(layer.targets_of(kernel)))
            return sorted({t for of_layer in found for t in of_layer})

    # -- writing ------------------------------------------------------------------------------------------------------------
    def record(self, records: Iterable[Record], *, layer: int = OWN, must: bool = False) -> int:
        """Store records in `layer` (OWN, TEAM), all or none. Returns the number of records that were new, or known only from a farther
        layer. If the file cannot be written, records are kept in memory (`problem` says why), or, with `must`, DatabaseError is raised."""
        rows = [(type(r), insert_values(r, layer)) for r in records]
        return self.storage.write(lambda conn: insert_rows(conn, rows), must=must) if rows else 0

    def begin_search(self, kernel: str, target: str, *, strategy: str = "beam", executor: str = "",
                     config: Mapping[str, Any] | None = None, svod: str = "") -> str:
        """Record the start of a search. Returns its id, for the field `search` of its measurements and verdicts."""
        search = Search(uuid.uuid4().hex, kernel, target, strategy=strategy, executor=executor, config=config or {}, svod=svod,
                        by=user_at_host(), started_at=time.time())
        self._searches[search.search] = search
        self.record([search])
        return search.search

    def end_search(self, search: str, outcome: str, result: Mapping[str, Any] | None = None) -> None:
        """Record the end of a search: its outcome ("finished", "budget", "interrupted", "failed"…), counts and times. Raises DatabaseError
        for a search that this handle did not begin."""
        begun = self._searches.pop(search, None)
        if begun is None:
            raise DatabaseError(f"search {search!r} was not begun with this database handle, or has ended")
        self.record([replace(begun, ended_at=time.time(), outcome=outcome, result=result or {})])

    def retract(self, kernel: str, target: str | None, linear: str | None, reason: str) -> int:
        """Write `retracted` verdicts for the chains of a kernel that may win, those that may be rounded in a plan, and the times of a
        convolution's forms or of a plan, optionally only for one target or one LINEAR. They are not used again under the same code
        generator, whatever records are merged later. Returns the number of LINEARs. Raises DatabaseError where nothing can be written."""
        evidence: list[Measurement | Rounding | PairTimes] = [m for m, _ in self.select(Measurement, kernel, target, shipped=True)
                                                  if m.step == "confirm" or linear]
        evidence += [r for r, _ in self.select(Rounding, kernel, target, shipped=True)]
        evidence += [c for c, _ in self.pair_times(kernel, target, shipped=True)]
        newest: dict[tuple[str, str], Measurement | Rounding | PairTimes] = {}
        for e in evidence:
            at = (e.target, e.linear)
            if e.linear and linear in (None, e.linear) and (at not in newest or e.codegen > newest[at].codegen):
                newest[at] = e
        verdicts = [Verdict(e.kernel, e.target, e.linear, "retracted", e.codegen, by=user_at_host(), method="svod-db retract",
                            compiler="" if isinstance(e, Rounding) else e.compiler, reason=reason, taken_at=time.time())
                    for e in newest.values()]
        if verdicts:
            self.record(verdicts, must=True)
        return len(verdicts)

    def restore(self, kernel: str, target: str | None, linear: str | None, reason: str) -> int:
        """Revoke the `retracted` verdicts of a kernel, optionally only for one target or one LINEAR, by writing `restored` verdicts, which
        are also exported and merged. Verdicts of wrong numbers stay. Returns the number of LINEARs. Raises DatabaseError where nothing can
        be written."""
        bars: dict[tuple[str, str], list[Verdict]] = {}
        for v in standing_bars([], (v for v, _ in self.select(Verdict, kernel, target, shipped=True))):
            if isinstance(v, Verdict) and v.verdict == "retracted" and linear in (None, v.linear):
                bars.setdefault((v.target, v.linear), []).append(v)
        verdicts = [Verdict(kernel, at, of, "restored", max(v.codegen for v in lifted), by=user_at_host(), method="svod-db retract --undo",
                            reason=reason, taken_at=time.time(), lifts=tuple(sorted(v.id for v in lifted)))
                    for (at, of), lifted in bars.items()]
        if verdicts:
            self.record(verdicts, must=True)
        return len(verdicts)

    def close(self) -> None:
        """Close all connections, after a last attempt to write the records in memory to the file; if it fails, a warning is logged."""
        with self.storage.lock:
            self.claims.heartbeat.stop()
            self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def origins_of(db: TuningDB, kernel: str | None = None) -> defaultdict[str, list[str]]:
    """Kernel key → the places in models that the kernel comes from."""
    origins: defaultdict[str, list[str]] = defaultdict(list)
    for key, origin in sorted({(o.kernel, o.origin) for o, _ in db.select(OriginRecord, kernel)}):
        origins[key].append(origin)
    return origins


def described(db: TuningDB, kernel: str | None = None, *, shipped: bool = False) -> dict[str, KernelRecord]:
    """Kernel key → its description of the highest AST version; of several, the one whose id is the largest."""
    return {k.kernel: k for k in sorted((k for k, _ in db.select(KernelRecord, kernel, shipped=shipped)), key=lambda k: k.ast_version)}
