"""Judges the blocks of a run: finds those that are slower than eager, wrong or fail, and for each the smallest block with the same fault.

    results of the suite → those beyond the limit, timed again → their kernels → ever smaller blocks, timed the same way → BlockFinding
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from svod.bench.blocks.block import Block
from svod.bench.blocks.families import BLOCK_SUITE, SLOWNESS_LIMIT, block_case
from svod.bench.blocks.shrink import shrink
from svod.bench.peers.alone import Alone
from svod.bench.results import SVOD, BlockFinding, CaseResult, FamilyResult, KernelShare, Shown
from svod.bench.suites.cases import REFERENCE, Case
from svod.bench.summary import geometric_mean
from svod.errors import SvodError

LEVELS = (1.1, 1.25, 1.6)       # multiples of eager's time above which blocks are counted
LEAST_EXCESS_SECONDS = 20e-6    # a smaller loss against eager is no finding, as calling a block may cost that much, whatever its kernels
OWN, EAGER = SVOD[0], REFERENCE[BLOCK_SUITE]

FindingKind = Literal["slow", "wrong", "failed"]


@dataclass(frozen=True)
class BlockVerdict:
    """The judgement on a block. `kind`: its fault; None if it is right and fast enough, or if eager does not run it. `ratio`: svod's
    time over eager's, by the median of the rounds. `sure`: the smaller of that ratio and the ratio of the least samples, because a busy
    machine makes one of them too large more often than both."""

    kind: FindingKind | None
    ratio: float | None = None
    why: str = ""
    sure: float = 0.0


def verdict_of(case: CaseResult, limit: float) -> BlockVerdict:
    """Judge a block by its result. `limit`: the multiple of eager's time above which it is slow."""
    own, eager = case.outcome(OWN), case.outcome(EAGER)
    if own is None or eager is None or eager.status != "ok":
        return BlockVerdict(None)
    if own.status in ("wrong", "failed"):
        return BlockVerdict("wrong" if own.status == "wrong" else "failed", None, own.why)
    if own.minimum is None or eager.minimum is None:
        return BlockVerdict(None, None, own.why)
    ratio = 1 / own.speedups[EAGER].median
    sure = min(ratio, own.minimum / eager.minimum)
    is_slow = sure > limit and own.minimum - eager.minimum > LEAST_EXCESS_SECONDS
    return BlockVerdict("slow" if is_slow else None, ratio, f"{ratio:.2f} times eager's time" if is_slow else "", sure)


def faults_of(case: CaseResult) -> tuple[str, ...]:
    """The names of svod's contestants that are wrong or fail; of a block none that is as wrong as eager, or fails as eager does."""
    eager = case.outcome(EAGER) if case.suite == BLOCK_SUITE else None
    excused = () if eager is None else (eager.status,)
    return tuple(o.name for o in case.contestants if o.name in SVOD and o.status in ("wrong", "failed") and o.status not in excused)


@dataclass
class Investigation:
    """Finds the faults of blocks. `measure` times a block as the suite does. `limit`: the multiple of eager's time above which a block
    is slow."""

    alone: Alone
    measure: Callable[[Case], CaseResult]
    limit: float = SLOWNESS_LIMIT
    judged: int = field(default=0, init=False)

    def findings(self, cases: Sequence[Case], results: Sequence[CaseResult]) -> Iterator[tuple[CaseResult, BlockFinding | None]]:
        """Time each block again whose result has a fault. Yields the later result, with the finding or, if that result has no fault,
        None."""
        by_name = {c.name: c for c in cases}
        for result in results:
            case = by_name.get(result.name)
            if case is not None and result.suite == BLOCK_SUITE and verdict_of(result, self.limit).kind is not None:
                again = self.measure(case)
                verdict = verdict_of(again, self.limit)
                yield again, None if verdict.kind is None else self._finding(case, verdict)

    def _finding(self, case: Case, verdict: BlockVerdict) -> BlockFinding:
        block: Block = case.options["block"]
        assert verdict.kind is not None
        found = Shown(str(block), verdict.ratio, self._kernels(case))
        ratios = {block: verdict.ratio}
        # a smaller block shows a slow block's fault if its ratio is at least the geometric mean of the limit and the block's ratio
        least = math.sqrt(self.limit * verdict.sure)
        self.judged = 0

        def shows(smaller: Block) -> bool:
            self.judged += 1
            other = verdict_of(self.measure(block_case(smaller, limit=self.limit)), self.limit)
            ratios[smaller] = other.ratio
            return other.kind == verdict.kind and other.sure >= least
        smallest = shrink(block, shows)
        shown = found if smallest == block else Shown(str(smallest), ratios[smallest], self._kernels(block_case(smallest)))
        return BlockFinding(case.name, verdict.kind, verdict.why, found, shown, self.judged)

    def _kernels(self, case: Case) -> tuple[KernelShare, ...]:
        """The kernels that svod runs for a block, timed one by one; () if svod cannot run it."""
        with suppress(SvodError), self.alone.entered(case) as peers:
            own = next(p for p in peers if p.name == OWN).prepare(case, [])
            if own.explain is not None:
                return own.explain()
        return ()


def family_results(results: Sequence[CaseResult]) -> tuple[FamilyResult, ...]:
    """Count the blocks of each family, in order of appearance, and of all together."""
    blocks = [r for r in results if r.suite == BLOCK_SUITE]
    names = list(dict.fromkeys(r.group for r in blocks))
    return tuple(_family(name, [r for r in blocks if name in (r.group, "all")]) for name in ([*names, "all"] if len(names) > 1 else names))


def _family(name: str, results: Sequence[CaseResult]) -> FamilyResult:
    verdicts = [(verdict_of(r, LEVELS[0]), r) for r in results]
    ratios = [(v.ratio, r.name) for v, r in verdicts if v.ratio is not None]
    slower = tuple(sum(verdict_of(r, level).kind == "slow" for r in results) for level in LEVELS)
    kinds = [v.kind for v, _ in verdicts]
    worst = max(ratios, default=(None, ""))
    return FamilyResult(name, len(results), slower, kinds.count("wrong"), kinds.count("failed"),
                        sum(v.kind is None and v.ratio is None for v, _ in verdicts),
                        geometric_mean([1 / ratio for ratio, _ in ratios]) if ratios else None,
                        None if worst[0] is None else 1 / worst[0], worst[1])
