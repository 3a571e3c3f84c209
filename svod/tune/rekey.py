"""Copies of old records under the current keys of their kernels.

A kernel's key is a digest of its canonical AST and of the revision of the canonical form. When svod changes that form, the key changes and
measurements would no longer be found. The AST is stored as data, so it is made canonical anew, and every record of the kernel is written
again under the current key. The old records stay. A chain that now gives another LINEAR than when it was measured is only a seed. Choices
of kernels to round are made anew, as digests of plans change with the keys.
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.schedule.canonical import AST_REVISION, canonicalize, key_of_canonical
from svod.core.schedule.family import family_key
from svod.errors import SvodError
from svod.tune.db import OWN, TEAM, KernelRecord, Measurement, OriginRecord, Search, TuningDB, Verdict
from svod.tune.db.records import Record, changed


class Rekeyed(NamedTuple):
    """The result of `rekey`. `kernels`, `records`: the numbers of kernels whose key has changed and of records added for them. `failed`:
    the kernels for which no key can be computed, each with the reason."""

    kernels: int
    records: int
    failed: list[tuple[str, str]]


def _with_key(key: str, record: Record) -> Record:
    return replace(record, kernel=key)  # type: ignore[call-arg]  # all kinds that are given have a kernel


def rekey(db: TuningDB) -> Rekeyed:
    """Add, under today's keys, the records of all kernels whose key or whose structure was made by an older revision. Raises DatabaseError
    where nothing can be written."""
    added = kernels = 0
    failed: list[tuple[str, str]] = []
    for k, layer in db.select(KernelRecord):
        try:
            ast, _ = canonicalize(data_to_ast(k.ast))
            key, structure = key_of_canonical(ast), family_key(ast)
        except SvodError as e:
            failed.append((k.kernel, str(e)))
            continue
        if (key, structure) == (k.kernel, k.structure):
            continue
        known = {r.kernel for r in db.family(structure, shipped=False)}
        described = replace(k, kernel=key, ast=ast_to_data(ast), ast_version=AST_REVISION, structure=structure)
        kinds: tuple[type[Record], ...] = (Measurement, Verdict, Search, OriginRecord) if key != k.kernel else ()
        old = [pair for kind in kinds for pair in db.select(kind, k.kernel)]
        records = [(described, layer), *zip(changed((r for r, _ in old), partial(_with_key, key)), (at for _, at in old), strict=True)]
        # a record stays in its layer, so that a measurement of others never counts as one of this machine
        added += sum(db.record([r for r, at in records if at == one], layer=one, must=True) for one in (OWN, TEAM))
        kernels += key not in known
    return Rekeyed(kernels, added, failed)
