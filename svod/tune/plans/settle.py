"""Giving up tuned chains that are slower inside their plan than the heuristic's chains.

    time the plan with the heuristic's and with tuned chains → record the losses → choose chains again by the database → repeat

A search times kernels by themselves: small ones with their operands in the caches, large ones with the caches about as a plan leaves them.
In a plan weights come from memory, and the results of one kernel are in the caches for the next: a chain without prefetches, or with stores
that bypass the caches, may be faster by itself and slower in a plan.
Measurements inside a plan are recorded and judged by themselves (`svod.tune.db.winners`, rule 6), so that no later search prefers the
chain again.
"""
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from svod.bench.timer import protocol_of
from svod.compile.plan.compiler import Compiled, Compiler
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.system.quantities import seconds as duration
from svod.tune.db import Measurement, TuningDB
from svod.tune.plans.check import InPlan, PlanCheck, name_of

ROUNDS = 3      # most rounds of timing and giving up: the chain that replaces one that was given up may be slower as well


@dataclass(frozen=True)
class BothWays:
    """The check of a plan that was timed with the heuristic's and with tuned chains, and its code for both, by kernel key."""

    check: PlanCheck
    heuristic: Mapping[str, Compiled]
    tuned: Mapping[str, Compiled]


class Settling:
    """The rounds in which a plan gives up tuned chains that are slower inside it than the heuristic's.

        settling = Settling(unbound, digest, compiler, db)
        while settling.gives_up(time_with_the_chains_that_the_database_chooses_now()):
            pass

    Kernels with variables keep their chains, as the plan is timed at only one of their sizes. On a busy machine no chain is given up."""

    def __init__(self, unbound: UnboundPlan, digest: str, compiler: Compiler, db: TuningDB) -> None:
        self._unbound, self._digest, self._compiler, self._db = unbound, digest, compiler, db
        self._rounds = 0
        self.check: PlanCheck | None = None     # the check of the plan with the chains that are left; None: it was not timed

    def gives_up(self, now: BothWays) -> bool:
        """Record the losses of a timed plan. Returns whether a chain was given up, so that the plan is timed again."""
        self._rounds += 1
        given_up = () if self.check is None else self.check.given_up
        losses = [k for k in now.check.losses if not self._unbound.kernels[k.kernel].variables]
        if self._rounds == ROUNDS or now.check.noisy:
            losses = []
        self._db.record([_measurement(k, now, self._digest, self._compiler) for k in losses])
        given_up += tuple(f"{name_of(self._unbound, k.kernel)}: {_in_words(k)}" for k in losses)
        self.check = replace(now.check, given_up=given_up)
        return bool(losses)


def _in_words(k: InPlan) -> str:
    return f"inside the plan its chain takes {duration(k.inside.tuned)}, the heuristic's {duration(k.inside.heuristic)}"


def _measurement(k: InPlan, found: BothWays, digest: str, compiler: Compiler) -> Measurement:
    """The record of a kernel's tuned chain as it was timed inside the plan."""
    tuned, heuristic = found.tuned[k.kernel], found.heuristic[k.kernel]
    return Measurement(kernel=k.kernel, target=compiler.target.key, chain=tuple(tuple(o.to_json()) for o in tuned.chain),
                       linear=tuned.linear, status="ok", codegen=compiler.pair.revision, compiler=compiler.pair.key,
                       protocol=protocol_of(compiler.target), step="confirm", time=k.inside.tuned, baseline=k.inside.heuristic,
                       baseline_linear=heuristic.linear, ratio=k.ratio.median, ratio_low=k.ratio.low, ratio_high=k.ratio.high,
                       noisy=found.check.noisy is not None, inside=digest, taken_at=time.time())
