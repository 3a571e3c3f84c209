"""Giving up tuned chains that are slower inside their plan than the heuristic's chains.

    time the plan with the heuristic's and with tuned chains → record the losses → choose chains again by the database → repeat

A search times kernels by themselves: small ones with their operands in the caches, large ones with the caches about as a plan leaves them.
In a plan weights come from memory, and the results of one kernel are in the caches for the next: a chain without prefetches, or with stores
that bypass the caches, may be faster by itself and slower in a plan. Measurements inside a plan are recorded and judged by themselves
(`svod.tune.db.winners`, rule 6), so that no later search prefers the chain again.

Times are compared in pairs, so that a busy machine makes the intervals wider and does not favour one of the two. Where the plan as a whole
is slower beyond noise, and no kernel stands out, it gives up all tuned chains but those that are faster inside it: the records have the
times of the plan.
"""
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from svod.bench.race import Ratio
from svod.bench.timer import protocol_of
from svod.compile.plan.compiler import Compiled, Compiler
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.system.quantities import seconds as duration
from svod.tune.db import Measurement, TuningDB
from svod.tune.db.winners import LEVEL_FACTOR
from svod.tune.plans.check import Gain, InPlan, PlanCheck, name_of

# most rounds of timing; the last one gives nothing up. The chain that replaces one that was given up may be slower as well
ROUNDS = 4


@dataclass(frozen=True)
class BothWays:
    """The check of a plan that was timed with the heuristic's and with tuned chains, and its code for both, by kernel key."""

    check: PlanCheck
    heuristic: Mapping[str, Compiled]
    tuned: Mapping[str, Compiled]

    @property
    def changed(self) -> tuple[str, ...]:
        """The keys of the kernels whose tuned chain is not the heuristic's."""
        return tuple(k for k, code in self.tuned.items() if code.chain != self.heuristic[k].chain)


class _GivenUp(NamedTuple):
    """A chain to give up: the times and their ratio, of the kernel inside the plan or of the whole plan, and the same in words."""

    kernel: str
    times: Gain
    ratio: Ratio
    words: str


class Settling:
    """The rounds in which a plan gives up tuned chains that are slower inside it than the heuristic's.

        settling = Settling(unbound, digest, compiler, db)
        while settling.gives_up(time_with_the_chains_that_the_database_chooses_now()):
            pass

    Kernels with variables keep their chains, as the plan is timed at only one of their sizes."""

    def __init__(self, unbound: UnboundPlan, digest: str, compiler: Compiler, db: TuningDB) -> None:
        self._unbound, self._digest, self._compiler, self._db = unbound, digest, compiler, db
        self._rounds = 0
        self.check: PlanCheck | None = None     # the check of the plan with the chains that are left; None: it was not timed

    def gives_up(self, now: BothWays) -> bool:
        """Record the losses of a timed plan. Returns whether a chain was given up, so that the plan is timed again."""
        self._rounds += 1
        given_up = () if self.check is None else self.check.given_up
        losses = self._losses(now) if self._rounds < ROUNDS else []
        self._db.record([_measurement(x, now, self._digest, self._compiler) for x in losses])
        given_up += tuple(f"{name_of(self._unbound, x.kernel)}: {x.words}" for x in losses)
        self.check = replace(now.check, given_up=given_up)
        return bool(losses)

    def _losses(self, now: BothWays) -> list[_GivenUp]:
        """The chains to give up: those that lose inside the plan, else, of a plan that loses as a whole, those that do not gain."""
        check, fixed = now.check, {key for key, kernel in self._unbound.kernels.items() if kernel.variables}
        losses = [k for k in check.losses if k.kernel not in fixed]
        if losses or check.ratio.low <= LEVEL_FACTOR:
            return [_GivenUp(k.kernel, k.inside, k.ratio, _in_words(k)) for k in losses]
        kept, plan = fixed.union(k.kernel for k in check.kernels if k.ratio.high < 1.0), Gain(check.heuristic, check.measured)
        words = f"the plan takes {duration(plan.tuned)} with its tuned chains, {duration(plan.heuristic)} with the heuristic's, " \
                "and no kernel stands out"
        return [_GivenUp(k, plan, check.ratio, words) for k in now.changed if k not in kept]


def _in_words(k: InPlan) -> str:
    return f"inside the plan its chain takes {duration(k.inside.tuned)}, the heuristic's {duration(k.inside.heuristic)}"


def _measurement(loss: _GivenUp, found: BothWays, digest: str, compiler: Compiler) -> Measurement:
    """The record of a kernel's tuned chain as it was timed inside the plan."""
    tuned, heuristic = found.tuned[loss.kernel], found.heuristic[loss.kernel]
    return Measurement(kernel=loss.kernel, target=compiler.target.key, chain=tuple(tuple(o.to_json()) for o in tuned.chain),
                       linear=tuned.linear, status="ok", codegen=compiler.pair.revision, compiler=compiler.pair.key,
                       protocol=protocol_of(compiler.target), step="confirm", time=loss.times.tuned, baseline=loss.times.heuristic,
                       baseline_linear=heuristic.linear, ratio=loss.ratio.median, ratio_low=loss.ratio.low, ratio_high=loss.ratio.high,
                       noisy=found.check.noisy is not None, inside=digest, taken_at=time.time())
