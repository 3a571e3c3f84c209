"""Mutated records and files through import, merge, list and prepare: nothing of it may stop, slow down, or be executed by svod.

    python experiments/mutated_records.py --files 10000 --records 100

Each file is made from true records of two small kernels, on this machine's target, by mutations that a seed decides: as a JSON Lines layer,
a database, a lock file or a capture. A file is then

    jsonl      imported into a database, listed and prepared from there; listed and prepared from as a layer of its own
    database   merged, listed and prepared from; as the second layer, and, where nobody forged a digest, as the own database
    lock       named by PrepareConfig(lock=…)
    capture    read, written again, and read again

Mutations of records: flipped bits, truncation, nesting of 100 to 100,000 levels, halves of surrogate pairs, huge numbers, NaN, wrong
types, chains of 10,000 opts, duplicated and removed keys, forged digests, and forgeries whose digests are right: random chains, slow ones
among them, that claim to be ten times as fast. Of files: flipped bytes, truncation, other headers, garbage beside them; of databases views,
recursive queries, triggers, virtual tables, generated columns, missing columns, columns of other types, forged layers, cyclic pages.

What is a finding: an exception out of `prepare`, or one from a command that is not an error of svod's; a plan whose numbers are wrong; a
plan that takes 10 times as long as the heuristic's; a process started, a pickle read, an extension loaded; a file that takes longer than
--limit, or that ends the process. Findings are printed with the number of their file; `--only NUMBER` makes that file again, to look at.
The exit status is 0 where there is none.
"""
from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import numpy as np  # noqa: E402
from click import ClickException  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import svod  # noqa: E402
from svod import PrepareConfig, Tensor  # noqa: E402
from svod.cli.db.commands import cli as svod_db  # noqa: E402
from svod.compile.backend import device_named  # noqa: E402
from svod.compile.plan.compiler import compiler_for  # noqa: E402
from svod.core.kernel.apply import apply_opt  # noqa: E402
from svod.core.kernel.chain_text import chain_text  # noqa: E402
from svod.core.kernel.opts import OPTS  # noqa: E402
from svod.core.kernel.scheduler import Opt, Scheduler  # noqa: E402
from svod.core.machine.target import HOST  # noqa: E402
from svod.errors import KernelOptError, SvodError  # noqa: E402
from svod.tune import capture, resolved  # noqa: E402
from svod.tune.db import KernelRecord, Measurement, OriginRecord, Record, Search, TargetFacts, TuningDB, Verdict, layers  # noqa: E402
from svod.tune.db.records import RECORDS, record_from_json  # noqa: E402
from svod.tune.lock import LOCK_FORMAT as LOCK_FORMAT  # noqa: E402

MEMORY = 8 << 30            # bytes of address space of a worker
SLOWER = 10.0               # times the heuristic's time: what no record may make of a kernel
LEAST_SECONDS = 50e-6       # a plan that takes less is not called slow
CHAINS = 40                 # random chains of each kernel
SUFFIX = {"jsonl": ".jsonl", "database": ".db", "lock": ".lock.jsonl", "capture": ".capture.jsonl"}
KINDS = ["jsonl"] * 4 + ["database"] * 4 + ["lock", "capture"]
#: Python's audit events that no file may bring about.
EXECUTED = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "sqlite3.enable_load_extension",
            "sqlite3.load_extension"}


# -- what is mutated --------------------------------------------------------------------------------------------------------
class Model:
    """Two plans whose right numbers are known, and true records of their kernels."""

    def __init__(self, directory: Path) -> None:
        rng = np.random.default_rng(0)
        self.a, self.b, self.x = (rng.standard_normal(s).astype(np.float32) for s in ((96, 64), (64, 80), (60, 300)))
        self.cache = str(directory / "objects")
        self.right = (self.a.astype(np.float64) @ self.b, self._softmax(self.x.astype(np.float64)))
        self.slow: dict[tuple[Any, ...], bool] = {}
        self.chains: list[tuple[str, tuple[Any, ...], str]] = []        # kernel, chain, LINEAR
        self.bases: dict[str, Scheduler] = {}
        self.records = list(self._records())
        self.lock = [json.dumps({"format": LOCK_FORMAT, "version": 1})] + [
            json.dumps({"kernel": k, "target": self.target, "chain": chain_text([Opt.from_json(list(o)) for o in chain])})
            for k, chain, _ in self.chains]
        self.prepare(PrepareConfig(db=":none:", threads=1, object_cache=self.cache, capture=str(directory / "capture")))
        self.capture = next((directory / "capture").glob("*.jsonl")).read_text(encoding="utf-8").splitlines()
        self.heuristic = [self._seconds(p) for p in self.plans(PrepareConfig(db=":none:", threads=1, object_cache=self.cache))]

    @staticmethod
    def _softmax(x: Any) -> Any:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def _tensors(self) -> list[Tensor]:
        return [Tensor(self.a) @ Tensor(self.b), Tensor(self.x).softmax(-1)]

    def plans(self, config: PrepareConfig) -> list[Any]:
        return [t.prepare(config) for t in self._tensors()]

    def _seconds(self, plan: Any) -> float:
        times = []
        for _ in range(7):
            started = time.perf_counter()
            plan.execute()
            times.append(time.perf_counter() - started)
        return min(times)

    def prepare(self, config: PrepareConfig) -> tuple[list[str], list[str]]:
        """Prepare and run both plans. What is wrong with that, and where the chains came from."""
        found: list[str] = []
        sources: list[str] = []
        for number, (tensor, right) in enumerate(zip(self._tensors(), self.right, strict=True)):
            plan = tensor.prepare(config)
            plan.execute()
            if not np.allclose(tensor.numpy(), right, rtol=1e-4, atol=1e-4):
                found.append(f"wrong numbers with {[k.chain for k in plan.kernels]}")
            chains = tuple((k.opts_source, k.chain) for k in plan.kernels)
            sources += [source for source, _ in chains]
            if any(source in ("database", "lock") for source, _ in chains) and not self.slow.get((number, chains)):
                self.slow[number, chains] = True
                seconds = self._seconds(plan)
                if seconds > max(LEAST_SECONDS, SLOWER * self.heuristic[number]):
                    found.append(f"{seconds / self.heuristic[number]:.1f} times as slow as the heuristic with {chains}")
        return found, sources

    def _records(self) -> Iterator[Record]:
        rng = random.Random(1)
        for tensor in self._tensors():
            hand = svod.kernel(tensor)
            kernel = hand.key
            compiler = compiler_for(device_named(HOST).backend.target(1), PrepareConfig(threads=1, object_cache=self.cache))
            self.target, self.compiler = compiler.target.key, compiler.pair.key
            base = self.bases[kernel] = Scheduler(hand.kernel, compiler.target)
            yield KernelRecord(kernel, name="gemm", ast={"nodes": [1, 2]}, ast_version=1, structure="s", flops=1e6, bytes=1e4)
            yield OriginRecord(kernel, "model.py:12")
            yield Search(f"search of {kernel}", kernel, self.target, strategy="beam", config={"width": 8}, started_at=1e9, ended_at=1e9)
            heuristic = tuple(compiler.heuristic(hand.kernel))
            own = compiler.linear_of(hand.kernel, heuristic)
            for chain in [heuristic, (), *(random_chain(base, rng) for _ in range(CHAINS))]:
                linear = compiler.linear_of(hand.kernel, chain)
                data = tuple(tuple(o.to_json()) for o in chain)
                self.chains.append((kernel, data, linear))
                yield self.confirmed(kernel, data, linear, 1.0 if linear == own else rng.uniform(1.1, 30.0), own)
                yield Verdict(kernel, self.target, linear, "verified", compiler.pair.revision, compiler=self.compiler, taken_at=1e9)
        yield TargetFacts(self.target, {"cpu": "this one"})

    def confirmed(self, kernel: str, chain: Any, linear: str, ratio: float, own: str = "") -> Measurement:
        from svod.compile.llvm.codegen import CODEGEN_REVISION
        return Measurement(kernel, self.target, chain, linear, "ok", CODEGEN_REVISION, self.compiler, 1, step="confirm", time=1e-4 * ratio,
                           baseline=1e-4, ratio=ratio, ratio_low=0.99 * ratio, ratio_high=1.01 * ratio, samples=(1e-4 * ratio,) * 5,
                           baseline_linear=own, taken_at=1e9)


def random_chain(base: Scheduler, rng: random.Random, opts: int = 8) -> tuple[Any, ...]:
    """Opts that apply, chosen at random: slow ones among them."""
    state = base
    for _ in range(rng.randrange(1, opts)):
        for _ in range(30):
            try:
                state = apply_opt(state, random_opt(rng))
                break
            except KernelOptError:
                continue
    return tuple(state.applied_opts)


AXES = ["o0", "o1", "r0", "o0.in", "o1.in", "r0.in", "s0", "s1", "s2", "root", None, "o0.out"]
ARGUMENTS = [2, 3, 4, 8, 16, 32, 64, 128, "root", "o0", "o1", "r0", None, ("o1", "o0"), -1, 0, 1 << 40]
NAMES = sorted(OPTS)


def random_opt(rng: random.Random) -> Any:
    return Opt(rng.choice(NAMES), rng.choice(AXES), rng.choice(ARGUMENTS))


# -- mutations of records ---------------------------------------------------------------------------------------------------
HALF = "\ud83d"
ODD: list[Any] = [None, True, -1, 0, 1.5, "", "x", [], {}, [[]], {"a": 1}, "\x00", HALF, 10**400, 1 << 63, -(1 << 63), 1 << 64,
                  float("nan"), float("inf"), 1e308, 5e-324, "A" * 100_000, "__import__('os').system('touch pwned')",
                  "cos\nsystem\n(S'touch pwned'\ntR.",
                  "';DROP TABLE measurements;--", "\x1b]0;owned\x07", "../../../../etc/passwd", ["a"] * 5000, {"k" * 70_000: 1}]


def mutate_content(data: dict[str, Any], model: Model, rng: random.Random) -> dict[str, Any]:
    """One change of a record as JSON data."""
    data, name = dict(data), rng.choice(list(data))
    what = rng.randrange(10)
    if what == 0:
        del data[name]
    elif what <= 2:
        data[name] = rng.choice(ODD)
    elif what == 3:
        data[rng.choice(["extra", "later", "layer", HALF, "", "id", "kind"])] = rng.choice(ODD)
    elif what == 4:
        data["chain"] = rng.choice(model.chains)[1] * rng.choice([1, 2, 1000, 10_000]) or [["UPCAST", "o0", 2]] * 10_000
    elif what == 5:
        data["chain"] = [random_opt(rng).to_json() for _ in range(rng.choice([1, 5, 50, 999]))]
    elif what == 6:
        data["@nest"] = rng.choice([100, 1000, 3000, 100_000])
    elif what == 7:
        for x in ("ratio", "ratio_low", "ratio_high", "time", "baseline", "codegen", "taken_at", "samples"):
            if rng.random() < 0.4:
                data[x] = rng.choice([0, -1, 1e-300, 1e300, float("nan"), 10**400, 1 << 62, (1 << 62) - 1, "1", [1], None, True])
    elif what == 8:
        sizes = [{"at": {"v0": -1}, "seconds": 0, "ratio": 1e400}]
        data["host"] = rng.choice([{"sizes": ODD}, {"sizes": sizes}, {"variables": {"v0": HALF}}])
    else:
        data["kind"] = rng.choice(["measurement", "verdict", "kernel", "search", "target", "origin", "pickle", None, []])
    return data


def forged(model: Model, rng: random.Random) -> list[dict[str, Any]]:
    """Records whose digests are right: a chain that claims to be ten times as fast, verified, under its LINEAR or another one."""
    sensible = rng.random() < 0.3
    kernel, chain, linear = rng.choice(model.chains[::2 + CHAINS] if sensible else model.chains)       # the heuristic's come first
    if not sensible and rng.random() < 0.3:
        chain = tuple(tuple(random_opt(rng).to_json()) for _ in range(rng.choice([1, 3, 10, 100, 1000])))
    elif not sensible and rng.random() < 0.3:
        chain = tuple(tuple(o.to_json()) for o in random_chain(model.bases[kernel], rng, rng.choice([8, 20, 60])))
    ratio = rng.choice([0.1, 0.01, 0.002])
    codegen = rng.choice([0, 0, 0, 1, 1 << 61])
    made: list[dict[str, Any]] = []
    said = rng.choice(["verified"] * 5 + ["restored", "wrong"])
    for r in (model.confirmed(kernel, chain, linear, ratio), Verdict(kernel, model.target, linear, said, 0, by="a\x1b[2Jb")):
        data = r.to_json()
        if codegen or isinstance(r, Verdict):
            data["codegen"] = data.get("codegen", 0) + codegen if isinstance(r, Measurement) else made[0]["codegen"]
        made.append(redigested(data))
    return made


def redigested(data: dict[str, Any]) -> dict[str, Any]:
    """The record with the digest of its content, where it is one."""
    try:
        return record_from_json({k: v for k, v in data.items() if k != "id"}).to_json()
    except SvodError:
        return data


def text_of(data: dict[str, Any]) -> str:
    """JSON, as a careless or hostile writer would write it; "@nest" becomes that many brackets."""
    depth = data.get("@nest")
    text = json.dumps({("host" if k == "@nest" else k): v for k, v in data.items()}, ensure_ascii=True, default=str)
    if isinstance(depth, int) and 0 < depth <= 100_000:
        inner = "[" * depth + "]" * depth if depth % 3 else '{"a":' * depth + "1" + "}" * depth
        text = text.replace(f'"host": {depth}', f'"host": {inner}')
    return text


def mutate_text(text: str, rng: random.Random) -> bytes:
    """One change of a line as bytes."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    what = rng.randrange(7)
    if what <= 1:
        for _ in range(rng.choice([1, 1, 1, 3, 50])):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == 2:
        del data[rng.randrange(len(data) + 1):]
    elif what == 3 and data[:1] == b"{":
        data[1:1] = b'"kernel": ' + rng.choice([b'"x"', b"5", b"[]", b"NaN"]) + b", "
    elif what == 4:
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.choice([b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"\n", b"\\ud800", b"1e999"])
    elif what == 5:
        start = rng.randrange(len(data) + 1)
        data += data[start:start + rng.choice([1, 10, 1000])]
    else:
        data = bytearray(rng.randbytes(rng.choice([0, 1, 50, 5000])))
    return bytes(data)


def mutated_line(source: dict[str, Any], model: Model, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 3])):
        source = mutate_content(source, model, rng)
    if rng.random() < 0.4:
        source = redigested(source)
    text = text_of(source)
    return mutate_text(text, rng) if rng.random() < 0.3 else text.encode("utf-8", "surrogatepass")


# -- mutated files ----------------------------------------------------------------------------------------------------------
def make_file(path: Path, kind: str, count: int, model: Model, rng: random.Random) -> bool:
    """Write a mutated file with `count` records. Returns whether digests in it were forged."""
    forge = rng.random() < 0.5
    if kind == "database":
        make_database(path, count, model, rng, forge)
    elif kind == "lock":
        path.write_bytes(spoiled(b"\n".join(lock_lines(count, model, rng)), rng))
    elif kind == "capture":
        path.write_bytes(spoiled(b"\n".join(capture_lines(count, model, rng)), rng))
    else:
        lines = [json.dumps({"format": "svod-tune-db", "version": 2, "targets": [model.target]}).encode()]
        if rng.random() < 0.1:
            lines = [rng.choice([mutate_text(lines[0].decode(), rng), json.dumps({"format": "svod-tune-db", "version": rng.choice(ODD),
                                                                                "targets": rng.choice(ODD)}).encode()])]
        while len(lines) <= count:
            if forge and rng.random() < 0.3:
                lines += [text_of(d).encode("utf-8", "surrogatepass") for d in forged(model, rng)]
            elif rng.random() < 0.2:
                lines.append(text_of(rng.choice(model.records).to_json()).encode())
            else:
                lines.append(mutated_line(rng.choice(model.records).to_json(), model, rng))
        path.write_bytes(spoiled(b"\n".join(lines) + b"\n", rng))
    return forge


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """One file in five is damaged as a whole."""
    if rng.random() < 0.8:
        return data
    changed = bytearray(data)
    what = rng.randrange(4)
    if what == 0:
        for _ in range(rng.choice([1, 20, 500])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif what == 1:
        del changed[rng.randrange(len(changed)):]
    elif what == 2:
        changed[:0] = rng.choice([b"\xef\xbb\xbf", b"\x00" * 64, b"SQLite format 3\0", b"\x80\x04\x95", b"\n\n", b"[" * 100_000])
    else:
        changed += changed[:rng.randrange(len(changed))]
    return bytes(changed)


LONG_TEXTS = ["(" * 50_000, "UPCAST(" * 10_000, "a" * 99_000, f"UPCAST(o0, {'9' * 50_000})", "UPCAST(o0, 4" + "," * 50_000,
              " " * 99_000 + "x", "UPCAST(o0," + " " * 90_000, "UPCAST(o0, 2" + " " * 90_000 + "(", "\u0663", "UPCAST(o0, \u0663)", "\x85"]


def lock_lines(count: int, model: Model, rng: random.Random) -> Iterator[bytes]:
    yield model.lock[0].encode() if rng.random() < 0.9 else mutate_text(model.lock[0], rng)
    for _ in range(count):
        line = json.loads(rng.choice(model.lock[1:]))
        what = rng.randrange(6)
        if what == 0:
            line["chain"] = " ".join(str(random_opt(rng)) for _ in range(rng.choice([1, 5, 100]))) * rng.choice([1, 1, 100])
        elif what == 1:
            line["chain"] = line["chain"] * rng.choice([2, 100, 10_000])
        elif what == 2:
            line[rng.choice(list(line))] = rng.choice(ODD)
        elif what == 3:
            line["@nest"] = rng.choice([100, 100_000])
        elif what == 4:
            line["chain"] = rng.choice(LONG_TEXTS)
        text = text_of(line)
        yield mutate_text(text, rng) if what == 5 else text.encode("utf-8", "surrogatepass")


def capture_lines(count: int, model: Model, rng: random.Random) -> Iterator[bytes]:
    yield model.capture[0].encode() if rng.random() < 0.9 else mutate_text(model.capture[0], rng)
    for text in model.capture[1:]:
        yield text.encode()
    for _ in range(count):
        line = json.loads(rng.choice(model.capture[1:]))
        for _ in range(rng.choice([1, 1, 3])):
            mutate_deep(line, rng)
        text = json.dumps(line, default=str)
        yield mutate_text(text, rng) if rng.random() < 0.2 else text.encode("utf-8", "surrogatepass")


ODD_IN_CAPTURES: list[Any] = [*ODD, *range(-2, 5), 1 << 39, "float32", "index", "void", "ADD", "STORE", "constant"]


def mutate_deep(data: Any, rng: random.Random) -> None:
    """One change somewhere within nested lists and objects."""
    while isinstance(data, (dict, list)) and data:
        key = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
        if not isinstance(data[key], (dict, list)) or not data[key] or rng.random() < 0.1:
            data[key] = deepcopy(rng.choice(ODD_IN_CAPTURES))
            return
        data = data[key]


# -- hostile databases ------------------------------------------------------------------------------------------------------
ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT n AS id, n AS kernel, n AS target, n AS layer FROM t"
HUGE = "replace(hex(zeroblob(4000)), '0', hex(zeroblob(4000)))"      # 64 MB


def hostile_schema(conn: sqlite3.Connection, rng: random.Random) -> None:
    """One change of the tables that a reader must not fall for. Some fail in some files, which then stay as they are."""
    table = rng.choice([r.table for r in RECORDS] + ["claims", "pruned"])
    columns = [row[1] for row in conn.execute(f"PRAGMA table_info({table})")]
    column = rng.choice(columns)
    changes: list[Callable[[], Any]] = [
        lambda: conn.executescript(f"DROP TABLE {table}; CREATE VIEW {table} AS {ENDLESS}"),
        lambda: conn.executescript(f"ALTER TABLE {table} RENAME TO t2; CREATE VIEW {table} AS SELECT * FROM t2, t2 AS b, t2 AS c"),
        lambda: conn.execute(f"CREATE TRIGGER x AFTER INSERT ON {table} BEGIN DELETE FROM measurements; END"),
        lambda: conn.execute(f"CREATE TRIGGER x AFTER UPDATE ON claims BEGIN {ENDLESS}; END"),
        lambda: conn.executescript(f"DROP TABLE {table}; CREATE VIRTUAL TABLE {table} USING fts5({', '.join(columns)})"),
        lambda: conn.executescript(f"DROP TABLE {table}; CREATE TABLE {table}({', '.join(columns[1:])})"),
        lambda: conn.executescript(f"DROP TABLE {table}"),
        lambda: conn.executescript(f"ALTER TABLE {table} RENAME COLUMN {column} TO other"),
        lambda: conn.executescript(f"ALTER TABLE {table} ADD COLUMN x GENERATED ALWAYS AS ({HUGE})"),
        lambda: generated(conn, table, column, HUGE),
        lambda: generated(conn, table, column, "abs(-9223372036854775808)"),
        lambda: conn.execute(f"CREATE INDEX x ON {table}({column}, abs(random()), hex(zeroblob(100000)))"),
        lambda: conn.execute("DROP INDEX measurements_deciding"),
        lambda: conn.executescript("DROP INDEX measurements_deciding; CREATE INDEX measurements_deciding ON measurements(layer)"),
        lambda: conn.execute(f"PRAGMA user_version = {rng.choice([0, 1, 3, 99, -1, 2147483647])}"),
        lambda: conn.execute(f"PRAGMA application_id = {rng.choice([0, 1, -1])}"),
        lambda: conn.execute(f"UPDATE {table} SET {column} = randomblob(100000)"),
        lambda: conn.execute("UPDATE measurements SET layer = -9"),
        lambda: conn.execute(f"UPDATE {table} SET {column} = char(0) || {column}"),
        lambda: conn.executescript("PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE measurements(x)' "
                                   "WHERE name = 'measurements'"),
        lambda: conn.executescript("PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = "
                                   "(SELECT rootpage FROM sqlite_master WHERE name = 'verdicts') WHERE name = 'measurements'"),
    ]
    try:
        rng.choice(changes)()
    except sqlite3.Error:
        return


def generated(conn: sqlite3.Connection, table: str, column: str, expression: str) -> None:
    """The table anew, with a column that is computed when it is read."""
    columns = [row[1] for row in conn.execute(f"PRAGMA table_info({table})")]
    others = ", ".join(c for c in columns if c != column)
    declared = ", ".join(f"{c} GENERATED ALWAYS AS ({expression})" if c == column else c for c in columns)
    conn.executescript(f"CREATE TABLE t3 AS SELECT {others} FROM {table}; DROP TABLE {table}; CREATE TABLE {table}({declared}); "
                       f"INSERT INTO {table}({others}) SELECT {others} FROM t3; DROP TABLE t3")


def make_database(path: Path, count: int, model: Model, rng: random.Random, forge: bool) -> None:
    """A database of mutated rows, hostile as a whole in half of the files."""
    shutil.copy(model_template(model, path.parent), path)
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("BEGIN")
        made = 0
        while made < count:
            batch = [record_from_json(d) for d in forged(model, rng)] if forge and rng.random() < 0.3 else [rng.choice(model.records)]
            for record in batch:
                row: dict[str, Any] = {**record.to_row(), "layer": rng.choice([0, 0, 0, 1, 2, -1, 99, "0", None, 0.5, b"0"])}
                for _ in range(rng.choice([0, 0, 1] if forge else [0, 1, 1, 2])):
                    row[rng.choice(list(row))] = rng.choice([*ODD, b"\xff\xfe", b"", "[" * 100_000, "[[" * 40 + "]]" * 40, '{"a": NaN}'])
                insert(conn, record.table, row)
                made += 1
        for kernel, _, _ in model.chains[::40]:
            odd = [0, -1, 1e308, "x", b"\xff", "", 1 << 40, time.time()]
            claim = {name: rng.choice(odd) for name in ("token", "host", "boot_id", "pid", "heartbeat", "since")}
            insert(conn, "claims", {"kernel": kernel, "target": model.target, **claim})
            insert(conn, "pruned", {"kernel": kernel, "target": model.target, "before": rng.choice(odd)})
        conn.execute("COMMIT")
        if rng.random() < 0.5:
            hostile_schema(conn, rng)
    spoil_pages(path, rng)


def insert(conn: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    """Insert a row, where SQLite can hold it."""
    values = [v if isinstance(v, (int, float, str, bytes, type(None))) else json.dumps(v, default=str) for v in row.values()]
    with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
        conn.execute(f"INSERT OR REPLACE INTO {table}({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", values)


_template: dict[Path, Path] = {}


def model_template(model: Model, directory: Path) -> Path:
    if directory not in _template:
        _template[directory] = directory / "template.db"
        with TuningDB.open(directory / "template.db") as db:
            db.record([r for r in model.records if isinstance(r, KernelRecord)])
            assert db.problem is None, db.problem
        with closing(sqlite3.connect(directory / "template.db")) as conn:
            conn.execute("PRAGMA journal_mode = DELETE")
    return _template[directory]


def spoil_pages(path: Path, rng: random.Random) -> None:
    """One database in three is damaged, or has garbage beside it."""
    if rng.random() < 0.67:
        return
    data = bytearray(path.read_bytes())
    what = rng.randrange(6)
    if what == 0:
        for _ in range(rng.choice([1, 10, 200])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == 1:
        for _ in range(5):
            data[rng.randrange(100)] = rng.randrange(256)
    elif what == 2:
        del data[rng.randrange(len(data)):]
    elif what == 3 and len(data) >= 8192:       # pages in the place of others: cycles in the trees
        pages = len(data) // 4096
        for _ in range(3):
            a, b = rng.randrange(1, pages), rng.randrange(1, pages)
            data[a * 4096:(a + 1) * 4096] = data[b * 4096:(b + 1) * 4096]
    elif what == 4:
        Path(f"{path}-wal").write_bytes(rng.randbytes(rng.choice([0, 32, 5000])))
        Path(f"{path}-journal").write_bytes(rng.randbytes(rng.choice([0, 32, 5000])))
    else:
        data += rng.randbytes(rng.choice([1, 4096, 50_000]))
    path.write_bytes(data)


# -- what is done with a file -----------------------------------------------------------------------------------------------
class Trial:
    """One file: what is done with it, and what was found."""

    def __init__(self, model: Model, directory: Path, rng: random.Random, executed: list[str]) -> None:
        self.model, self.directory, self.rng, self.executed = model, directory, rng, executed
        self.findings: list[str] = []
        self.done: Counter[str] = Counter()

    def command(self, *words: str) -> None:
        """An svod-db command; errors of svod's are answers."""
        self.done[words[2]] += 1
        result = CliRunner().invoke(svod_db, words)
        e = result.exception
        if e is not None and not isinstance(e, (SystemExit, SvodError, ClickException, OSError)):
            self.findings.append(f"{' '.join(words[2:3])}: {type(e).__name__}: {e!s:.300}")

    def prepare(self, **given: Any) -> None:
        """Chains of others are used as they are; one prepare in 50 checks them first, which starts processes."""
        self.done["prepare"] += 1
        imported = "check" if "lock" not in given and self.rng.random() < 0.02 else "trust"
        self.done["prepare with checks"] += imported == "check"
        config = PrepareConfig(threads=1, object_cache=self.model.cache, imported=imported, check_budget=1e6,
                               transfer=self.rng.random() < 0.2, **{"db": ":none:", **given})
        before = len(self.executed)
        try:
            problems, sources = self.model.prepare(config)
            self.findings += [f"prepare: {problem}" for problem in problems]
            self.done.update(f"chains of the {source}" for source in sources)
        except Exception as e:  # nothing may come out of it
            self.findings.append(f"prepare: {type(e).__name__}: {e!s:.300}")
        finally:
            if imported == "check":
                del self.executed[before:]      # svod's own workers
            for db in resolved._databases.values():
                db.close()
            resolved._databases.clear()

    def claim(self, path: Path) -> None:
        """The first step of a search."""
        self.done["claim"] += 1
        try:
            with TuningDB.open(path) as db:
                for kernel in {k for k, _, _ in self.model.chains}:
                    db.claims.holder(kernel, self.model.target)
                    if (claim := db.claims.take(kernel, self.model.target)) is not None:
                        claim.release()
        except Exception as e:  # nothing may come out of it
            self.findings.append(f"claim: {type(e).__name__}: {e!s:.300}")

    def run(self, path: Path, kind: str, forge: bool) -> None:
        scratch = self.directory / "scratch.db"
        shutil.copy(model_template(self.model, self.directory), scratch)
        other = self.rng.choice([("stats",), ("export", "-o", str(self.directory / "out.jsonl")), ("show", self.model.chains[0][0]),
                            ("list", "--json"), ("why", self.model.chains[0][0]), ("rekey",)])
        if kind == "lock":
            self.prepare(lock=str(path))
        elif kind == "capture":
            self.read_capture(path)
        else:
            self.command("--db", str(scratch), "import" if kind == "jsonl" else "merge", str(path))
            self.command("--db", str(scratch), "list")
            self.prepare(db=str(scratch))
            layered = f"{self.directory / 'own.db'}{os.pathsep}{path}"
            self.command("--db", layered, "list")
            self.prepare(db=layered)
            self.command("--db", layered, *other)
            if kind == "database" and not forge:
                self.command("--db", str(path), "list")
                self.prepare(db=str(path))
                self.command("--db", str(path), "merge", str(model_template(self.model, self.directory)))
                self.command("--db", str(path), "gc")
                self.claim(path)
        for name in ("scratch.db", "own.db", "out.jsonl"):
            for at in self.directory.glob(f"{name}*"):
                at.unlink()

    def read_capture(self, path: Path) -> None:
        self.done["read_capture"] += 1
        again = path.with_suffix(".again")
        try:
            found = capture.read_capture(path)
            capture.write_capture(again, found)
            if len(capture.read_capture(again).plans) != len(found.plans):
                self.findings.append("capture: what was read is not what is read again")
        except SvodError:
            return
        except Exception as e:  # nothing else may come out of it
            self.findings.append(f"capture: {type(e).__name__}: {e!s:.300}")
        finally:
            again.unlink(missing_ok=True)


def do_file(number: int, records: int, model: Model, directory: Path, executed: list[str]) -> dict[str, Any]:
    """Make file `number` and try it. Returns what is reported."""
    rng = random.Random(number)
    trial = Trial(model, directory, rng, executed)
    kind = rng.choice(KINDS)
    path = directory / f"f{number}{SUFFIX[kind]}"
    forge = make_file(path, kind, records, model, rng)
    executed.clear()
    started = time.perf_counter()
    trial.run(path, kind, forge)
    seconds = time.perf_counter() - started
    findings = trial.findings + [f"executed: {event}" for event in sorted(set(executed))]
    for at in directory.glob(f"{path.name}*"):
        at.unlink()
    return {"kind": kind, "findings": findings, "done": trial.done, "seconds": seconds}


def worker(numbers: Sequence[int], records: int, directory: Path) -> None:
    """Do files, and say on stdout which one begins and what was found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    layers.shipped_files = lambda: ()       # type: ignore[assignment]
    logging.getLogger("svod").addHandler(logging.NullHandler())
    logging.getLogger("svod").propagate = False
    os.chdir(directory)
    say = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    model = Model(directory)
    executed: list[str] = []
    watching = False

    def audit(event: str, args: Any) -> None:
        if watching and event in EXECUTED:
            executed.append(event)
    sys.addaudithook(audit)
    for position, number in enumerate(numbers):
        say.write(json.dumps({"begin": number}) + "\n")
        watching = position > 0                 # late imports are compiled by then
        result = do_file(number, records, model, directory, executed)
        watching = False
        say.write(json.dumps({"end": number, **result}) + "\n")


# -- the whole --------------------------------------------------------------------------------------------------------------
def run(files: Sequence[int], records: int, processes: int, limit: float,
        tell: Callable[[str], None] = print) -> tuple[Counter[str], list[str]]:
    """Do the files in so many processes. Returns counts (files by kind, actions, records) and the findings."""
    counts: Counter[str] = Counter()
    findings: list[str] = []
    left = [list(files[i::processes]) for i in range(processes)]
    with tempfile.TemporaryDirectory() as directory:
        live = [_Worker(numbers, records, Path(directory) / str(i), limit) for i, numbers in enumerate(left) if numbers]
        while live:
            ready, _, _ = select.select([w.process.stdout for w in live], [], [], 1.0)
            for w in list(live):
                if w.process.stdout in ready:
                    w.read(counts, findings, tell)
                w.watch(findings, tell)
                if w.over:
                    live.remove(w)
    counts["records"] = records * sum(counts[kind] for kind in SUFFIX)
    return counts, findings


class _Worker:
    """A process that does files. One that hangs or dies is replaced, and goes on with the file after."""

    def __init__(self, numbers: list[int], records: int, directory: Path, limit: float) -> None:
        self.numbers, self.records, self.directory, self.limit = numbers, records, directory, limit
        self.over = False
        self._start()

    def _start(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.current: int | None = None
        self.unread = b""
        self.since = time.monotonic() + 60.0        # the start
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", str(self.directory), "--records", str(self.records)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, "SVOD_TUNE_DB": ":none:"})
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(self.numbers).encode())
        self.process.stdin.close()

    def read(self, counts: Counter[str], findings: list[str], tell: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)       # not readline, whose buffer select does not see
        if not data:
            self._ended(findings, tell)
            return
        *lines, self.unread = (self.unread + data).split(b"\n")
        for text in lines:
            self._take(json.loads(text), counts, findings, tell)

    def _take(self, line: dict[str, Any], counts: Counter[str], findings: list[str], tell: Callable[[str], None]) -> None:
        if "begin" in line:
            self.current, self.since = line["begin"], time.monotonic()
            return
        self.numbers.remove(line["end"])
        self.current = None
        counts[line["kind"]] += 1
        counts.update(line["done"])
        if (ms := round(1000 * line["seconds"])) > counts["slowest, ms"]:
            counts["slowest, ms"], counts["slowest, number"] = ms, line["end"]
        for problem in line["findings"]:
            findings.append(f"file {line['end']}, {line['kind']}: {problem}")
            tell(findings[-1])

    def watch(self, findings: list[str], tell: Callable[[str], None]) -> None:
        if not self.over and self.process.poll() is None and time.monotonic() - self.since > self.limit:
            self.process.send_signal(signal.SIGUSR1)        # it says on stderr what it does
            time.sleep(0.5)
            self.process.kill()
            self.process.wait()
            self._replace(f"it took more than {self.limit:g} s", findings, tell)

    def _ended(self, findings: list[str], tell: Callable[[str], None]) -> None:
        status = self.process.wait()
        if status == 0 and self.current is None:
            self.over = True
        else:
            self._replace(f"it ended the process with status {status}", findings, tell)

    def _replace(self, problem: str, findings: list[str], tell: Callable[[str], None]) -> None:
        findings.append(f"file {self.current}: {problem}")
        tell(findings[-1])
        if self.current is None:
            self.over = True        # it could not start
            return
        self.numbers.remove(self.current)
        self.over = not self.numbers
        if self.numbers:
            self._start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--records", type=int, default=100, help="of one file")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of one file")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="make this file in the current directory, and do nothing else")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        worker(json.load(sys.stdin), given.records, given.worker)
        return 0
    if given.only is not None:
        with tempfile.TemporaryDirectory() as directory:
            rng = random.Random(given.only)
            kind = rng.choice(KINDS)
            path = Path(f"f{given.only}{SUFFIX[kind]}").absolute()
            make_file(Path(directory) / path.name, kind, given.records, Model(Path(directory)), rng)
            shutil.copy(Path(directory) / path.name, path)
        print(path)
        return 0
    started = time.monotonic()
    counts, findings = run(range(given.first, given.first + given.files), given.records, given.processes, given.limit,
                           partial(print, flush=True))
    print(json.dumps({"counts": counts, "findings": len(findings), "seconds": round(time.monotonic() - started)}, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
