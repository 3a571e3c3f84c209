"""Records under the keys that kernels have today.

A kernel's key is a digest of its canonical AST and of the revision of that form. When either changes, what was measured would be lost,
although the AST is stored as data: it is made canonical anew, and every record of the kernel is written once more under the key of today.
The old records stay, as evidence always does. A chain whose LINEAR differs since is a seed, as always.
"""
from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.schedule.canonical import AST_REVISION, canonicalize, key_of_canonical
from svod.core.schedule.family import family_key
from svod.errors import SvodError
from svod.tune.db import KernelRecord, Measurement, OriginRecord, Search, TuningDB, Verdict
from svod.tune.db.records import Record


class Rekeyed(NamedTuple):
    """How many kernels have another key today, how many records were added for them, and the kernels that no key can be made for, with the
    reason."""

    kernels: int
    records: int
    failed: list[tuple[str, str]]


def vars_of(record: Record) -> dict[str, Any]:
    """The fields of a record."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


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
        records: list[Record] = [replace(k, kernel=key, ast=ast_to_data(ast), ast_version=AST_REVISION, structure=structure)]
        for kind in (Measurement, Verdict, Search, OriginRecord) if key != k.kernel else ():
            records += [kind(**{**vars_of(r), "kernel": key}) for r, _ in db.select(kind, k.kernel)]
        count = db.record(records, layer=layer, must=True)
        added, kernels = added + count, kernels + (key not in known)
    return Rekeyed(kernels, added, failed)
