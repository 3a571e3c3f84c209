"""What the chains of relatives are worth to models that were never searched.

    python experiments/transfer.py [--known-seconds 120] [--json FILE]

ResNet-18 and a block of BERT base are tuned first. Then, for ResNet-34 and for BERT blocks of other widths, five plans are made and timed
in interleaved rounds:

    heuristic      no database
    transfer       no search: the chains of relatives, checked
    search 60      a search of 60 s from nothing
    search 20      a search of 20 s that starts from relatives
    tuned          both searches' evidence and 60 s more: what the others are held against

The search of a model that has relatives is given a copy of the database of the known ones.
"""
from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "models"))

from bert_block import BertBlock
from resnet18 import ResNet18
from run_model import Array

# isort: split
import random

import numpy as np

import svod
from svod import BeamConfig, PrepareConfig, Tensor
from svod.bench.race import confirm, paired_ratio
from svod.bench.timer import Contestant
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.tune.at_prepare import begin_budget
from svod.tune.db import TuningDB

Model = tuple[Callable[[Tensor], Tensor], Array]

RNG = np.random.default_rng(1)
SEARCH, TRANSFER_SEARCH, MORE = 60.0, 20.0, 60.0
TIMING_SECONDS = 20.0


def image() -> Array:
    return RNG.standard_normal((1, 3, 224, 224), dtype=np.float32)


def tokens(hidden: int) -> Array:
    return RNG.standard_normal((1, 128, hidden), dtype=np.float32)


KNOWN: dict[str, Callable[[], Model]] = {"ResNet-18": lambda: (ResNet18(), image()), "BERT base": lambda: (BertBlock(), tokens(768))}
NEW: dict[str, Callable[[], Model]] = {
    "ResNet-34": lambda: (ResNet18(blocks=(3, 4, 6, 3)), image()),
    "BERT 512": lambda: (BertBlock(512, 8, 2048), tokens(512)),
    "BERT 1024": lambda: (BertBlock(1024, 16, 4096), tokens(1024))}


def prepare(model: Model, config: PrepareConfig) -> ExecutionPlan:
    """The plan of a model under a configuration, with its own budgets; its weights are constants."""
    begin_budget()
    call, x = model
    f = svod.jit(lambda x: call(x), config=config)
    f(Tensor(x))
    return f.plans[0]


def searched(model: Model, db: Path, seconds: float) -> ExecutionPlan:
    return prepare(model, PrepareConfig(db=str(db), beam=BeamConfig(width=8, budget=seconds, kernel_budget=seconds)))


def copy_database(source: Path, target: Path) -> None:
    """Copy a database that this process has open: its newest records are not in its file yet, but in the log beside it."""
    with closing(sqlite3.connect(source)) as there, closing(sqlite3.connect(target)) as here:
        there.backup(here)


def sources(plan: ExecutionPlan) -> str:
    return ", ".join(f"{n} {s}" for s, n in sorted(Counter(k.opts_source for k in plan.kernels).items()))


def study(name: str, model: Model, known: Path, directory: Path) -> dict[str, Any]:
    """The plans of one model, timed against the tuned one."""
    dbs = {kind: directory / f"{kind}.db" for kind in ("transfer", "from nothing", "from relatives", "tuned")}
    for kind in ("transfer", "from relatives"):
        copy_database(known, dbs[kind])
    seconds: dict[str, float] = {}

    def timed(kind: str, make: Callable[[], ExecutionPlan]) -> ExecutionPlan:
        started = time.perf_counter()
        plan = make()
        seconds[kind] = time.perf_counter() - started
        print(f"{name}: {kind}: {seconds[kind]:.1f} s; {sources(plan)}", flush=True)
        return plan

    plans = {
        "heuristic": timed("heuristic", lambda: prepare(model, PrepareConfig(db=":none:"))),
        "transfer": timed("transfer", lambda: prepare(model, PrepareConfig(db=str(dbs["transfer"]), check_budget=60.0))),
        "search 60": timed("search 60", lambda: searched(model, dbs["from nothing"], SEARCH)),
        "search 20": timed("search 20", lambda: searched(model, dbs["from relatives"], TRANSFER_SEARCH))}
    with TuningDB.open(dbs["tuned"]) as db:
        db.merge(dbs["from nothing"])
        db.merge(dbs["from relatives"])
    plans["tuned"] = timed("tuned", lambda: searched(model, dbs["tuned"], MORE))
    for plan in plans.values():
        plan.execute()
    names = list(plans)
    race = confirm([Contestant(plans[n].repeat) for n in names], min_rounds=15, precision=0.005, budget_seconds=TIMING_SECONDS,
                   rng=random.Random(0))
    columns = list(zip(*race.rounds, strict=True))
    ratios = {n: paired_ratio(columns[names.index("tuned")], column) for n, column in zip(names, columns, strict=True)}
    against = paired_ratio(columns[names.index("search 60")], columns[names.index("search 20")])
    print(f"{name}: of tuned: " + ", ".join(f"{n} {r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for n, r in ratios.items())
          + f"; search 60 over search 20: {against.median:.3f} ({against.low:.3f} to {against.high:.3f})", flush=True)
    return {"model": name, "seconds": seconds, "sources": {n: sources(p) for n, p in plans.items()},
            "milliseconds": {n: 1e3 * float(np.median(c)) for n, c in zip(names, columns, strict=True)},
            "of_tuned": {n: [r.median, r.low, r.high] for n, r in ratios.items()},
            "search_60_over_search_20": [against.median, against.low, against.high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known-seconds", type=float, default=120.0, help="search of each known model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        known = Path(directory) / "known.db"
        for name, make in KNOWN.items():
            print(f"{name}: {sources(searched(make(), known, args.known_seconds))}", flush=True)
        results = []
        for name, make in NEW.items():
            place = Path(directory) / name.replace(" ", "_")
            place.mkdir()
            results.append(study(name, make(), known, place))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
