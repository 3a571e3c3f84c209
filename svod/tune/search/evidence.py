"""Training data for a learned cost model from the database: measured states of other kernels, and of the same one in earlier searches."""
from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

from svod.bench.timer import protocol_of
from svod.compile.backend import Backend
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.errors import SvodError
from svod.tune.db import KernelRecord, Measurement, TuningDB
from svod.tune.search.cost_models import Evidence, evidence_of

log = logging.getLogger("svod.tune")

MOST_KERNELS = 24          # most kernels whose evidence is read
MOST_OF_A_KERNEL = 100     # most measurements of one kernel; they are drawn at random


def evidence_from(db: TuningDB, target: Target, backend: Backend) -> list[Evidence]:
    """Training samples from the measurements on `target` under the current timing protocol. If there are many kernels, some are drawn at
    random. A record that cannot be replayed is left out."""
    chance = random.Random(0)
    kernels = {k.kernel: k for k, _ in db.select(KernelRecord) if k.ast}
    names = sorted(kernels)
    chance.shuffle(names)
    found: list[Evidence] = []
    taught = 0
    for name in names:
        known = list(db.known_digests(name, target.key, protocol=protocol_of(target)).values())
        if taught == MOST_KERNELS:
            break
        of_kernel = list(_of_kernel(kernels[name].ast, chance.sample(known, min(MOST_OF_A_KERNEL, len(known))), target, backend))
        found += of_kernel
        taught += bool(of_kernel)
    log.info("the learned cost model begins with %d measurements of %d kernels", len(found), taught)
    return found


def _of_kernel(ast: Mapping[str, Any], measurements: list[Measurement], target: Target, backend: Backend) -> Iterator[Evidence]:
    timed = [m for m in measurements if m.status == "ok" and m.time and m.baseline]
    if not timed:
        return
    try:
        base = Scheduler(Kernel(data_to_ast(ast)), target)
        heuristic = backend.heuristic(base)
    except SvodError as e:
        log.info("a stored kernel cannot be read and teaches nothing: %s", e)
        return
    for m in timed:
        try:
            state = apply_opts(base, chain_of(m.chain))
        except SvodError:
            continue        # the chain comes from a version of svod with other opts
        evidence = evidence_of(state, heuristic, (m.time or 0.0) / (m.baseline or 1.0))
        if evidence is not None:
            yield evidence
