"""Record spaces for the comparison of strategies: about 3,000 candidates of each of six kernels, measured by local workers.

    python experiments/strategies/record.py                          # all kernels; goes on where it was ended
    python experiments/strategies/record.py --only gemm,conv --candidates 500
    python experiments/strategies/record.py --strategies 250         # then: what searches of 250 measurements by each strategy ask for
    python experiments/strategies/record.py --again 1400             # then: more samples of the fastest of each kernel

The states come from three sources, so that no strategy finds its own region alone: neighbours of the best, neighbours of any measured
state, the fast ones more often, and random walks, of which every step is recorded. Every candidate is lowered, compiled without passes and
screened twice, as a search does it. What is far behind the best gets fewer samples. On a machine that does other things meanwhile a sample
may take several times what the candidate does, so the fastest get more samples, some time later.
"""
from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from replay import RecordedMeasurer, Space, run
from spaces import CASES, Recorded, append, kernel_of, read, target

# isort: split
from svod.config import STRATEGIES, BeamConfig, BenchConfig
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import heuristic, sketches
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.measure.measurer import Failure, Lowered
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.search.actions import apply_tied, default_actions, lanes_of, mutations
from svod.tune.search.strategies.registry import make_strategy
from svod.tune.workers.executor import Executor
from svod.tune.workers.start import make_executor

CHUNK = 48
BEST = 8                # states whose neighbours are recorded first
NEAR, ANY = 0.45, 0.25  # shares of a chunk: neighbours of the best, of any state; the rest are walks
WALK = 8                # most steps of a walk
AGAIN = 5               # screenings of the fastest, later
SEED = 1000             # seeds of the recorded searches; the comparison has others
TRIES = 2000            # proposals in vain after which a kernel has nothing left
CONFIG = BeamConfig(runs=3)
SLOW = 5.0              # a candidate that takes this many times the best is not timed further


def neighbours(base: Scheduler, state: Scheduler, lanes: int) -> Iterator[Scheduler]:
    """All states one action or mutation away."""
    for opt in default_actions(state, lanes):
        try:
            after = apply_opt(state, opt)
        except KernelOptError:
            continue
        yield after
        tied = apply_tied(state, opt, after)
        if tied is not None:
            yield tied
    yield from mutations(base, state.applied_opts, lanes)


class Explorer:
    """Proposes states of one kernel that are not recorded yet."""

    def __init__(self, name: str, known: list[Recorded]) -> None:
        self.base = Scheduler(kernel_of(name), target())
        self.lanes = lanes_of(self.base.kernel, self.base.target)
        self.random = random.Random(f"{name} {len(known)}")
        self.starts = [self.base, heuristic(self.base), *sketches(self.base)]
        self.seen = {r.digest for r in known}
        self.linear: set[str] = {r.linear for r in known if r.linear}
        self.timed = [(min(r.seconds), apply_opts(self.base, [Opt.from_json(o) for o in r.chain])) for r in known if r.seconds]
        self.timed.sort(key=lambda t: t[0])
        self.around: dict[bytes, list[Scheduler]] = {}

    @property
    def best(self) -> float | None:
        return self.timed[0][0] if self.timed else None

    def chunk(self) -> list[Scheduler]:
        """The next states to measure; fewer than a chunk where hardly anything is left."""
        chosen: dict[bytes, Scheduler] = {}
        tries = 0
        queue = [s for s in self.starts if s.digest.hex() not in self.seen]
        while len(chosen) < CHUNK and tries < TRIES:
            tries += 1
            for state in [queue.pop(0)] if queue else self.propose():
                if state.digest.hex() not in self.seen and self.is_possible(state):
                    chosen[state.digest] = state
        return list(chosen.values())

    def is_possible(self, state: Scheduler) -> bool:
        try:
            return cost_of(state).accumulators <= CONFIG.upcast_max
        except KernelOptError:
            return False

    def propose(self) -> list[Scheduler]:
        draw = self.random.random()
        if not self.timed or draw > NEAR + ANY:
            return self.walk()
        place = self.random.randrange(min(BEST, len(self.timed))) if draw < NEAR else int(len(self.timed) * self.random.random() ** 3)
        found = self.around_of(self.timed[place][1])
        return [found.pop()] if found else []

    def around_of(self, state: Scheduler) -> list[Scheduler]:
        """The neighbours of a state that were not proposed yet, in random order."""
        if state.digest not in self.around:
            distinct = {s.digest: s for s in neighbours(self.base, state, self.lanes)}
            found = [s for d, s in sorted(distinct.items()) if d.hex() not in self.seen]
            self.random.shuffle(found)
            self.around[state.digest] = found
        return self.around[state.digest]

    def walk(self) -> list[Scheduler]:
        state = self.random.choice([self.base, self.random.choice(self.starts)])
        steps = []
        for _ in range(self.random.randint(1, WALK)):
            actions: dict[str, list[Opt]] = {}
            for opt in default_actions(state, self.lanes):
                actions.setdefault(opt.op, []).append(opt)
            for _ in range(20):
                opt = self.random.choice(actions[self.random.choice(sorted(actions))])
                try:
                    after = apply_opt(state, opt)
                except KernelOptError:
                    continue
                state = (self.random.random() < 0.5 and apply_tied(state, opt, after)) or after
                break
            steps.append(state)
        return steps

    def note(self, states: list[Scheduler], recorded: list[Recorded]) -> None:
        for state, r in zip(states, recorded, strict=True):
            self.seen.add(r.digest)
            self.linear.add(r.linear)
            if r.seconds:
                self.timed.append((min(r.seconds), state))
        self.timed.sort(key=lambda t: t[0])


def measure(states: list[Scheduler], measurer: WorkerMeasurer, linear: set[str], best: float | None) -> list[Recorded]:
    """Lower, build and screen. `linear`: the digests that are recorded; `best`: seconds."""
    candidates = [Candidate(s, s.applied_opts, Origin.ACTION) for s in states]
    facts: dict[Candidate, dict[str, Any]] = {c: {"linear": "", "size": 0, "status": "ok"} for c in candidates}

    def fails(c: Candidate, answer: Any) -> bool:
        if isinstance(answer, Failure):
            facts[c].update(status=str(answer.status), reason=answer.reason[:200], seconds=())
        return isinstance(answer, Failure)
    known, new = set(linear), []
    answers = dict(measurer.lower(candidates, CONFIG.uops_max))
    for c in candidates:
        lowered = answers[c]
        if fails(c, lowered):
            continue
        c.linear = lowered.digest
        facts[c].update(linear=lowered.digest, size=lowered.size)
        if lowered.digest in known:
            facts[c]["status"] = "duplicate"
            continue
        known.add(lowered.digest)
        new.append(c)
    built = []
    for c, code in zip(new, measurer.build(new, final=False, deadline=CONFIG.timeout_sec), strict=True):
        if not fails(c, code):
            c.built = code
            facts[c]["compiled"] = code.seconds
            built.append(c)
    limit = None if best is None else best * SLOW / 1.5
    for again in (False, True):
        timed = [c for c in built if facts[c]["status"] == "ok"]
        for c, screened in zip(timed, measurer.screen(timed, limit), strict=True):
            if not fails(c, screened):
                facts[c]["seconds"] = (*facts[c].get("seconds", ()), *screened.samples)
                if screened.cut and not again:
                    facts[c]["status"] = "slow"
    for c in built:
        facts[c]["status"] = "ok" if facts[c].get("seconds") else facts[c]["status"]
    return [Recorded(c.digest.hex(), [o.to_json() for o in c.chain], predicted=cost_of(c.state).cycles, **facts[c]) for c in candidates]


def record(name: str, count: int, executor: Executor) -> None:
    """Record until `count` candidates of a kernel have a time."""
    known = list(read(name))
    explorer = Explorer(name, known)
    measurer = WorkerMeasurer(kernel_of(name), target(), executor, CONFIG, BenchConfig())
    measured, states = sum(bool(r.seconds) for r in known), len(known)
    started, before = time.monotonic(), measured
    while measured < count:
        chunk = explorer.chunk()
        if not chunk:
            print(f"{name}: nothing is left to propose", flush=True)
            return
        recorded = measure(chunk, measurer, explorer.linear, explorer.best)
        explorer.note(chunk, recorded)
        append(name, recorded)
        measured, states = measured + sum(bool(r.seconds) for r in recorded), states + len(recorded)
        rate = (measured - before) / (time.monotonic() - started)
        print(f"{name}: {measured} measured of {states} states, {rate:.1f}/s, best {1e6 * (explorer.best or 0):.2f} µs", flush=True)


class RecordingMeasurer(RecordedMeasurer):
    """Answers from the records, and measures and records what they lack."""

    def __init__(self, space: Space, rng: random.Random, measurer: WorkerMeasurer) -> None:
        super().__init__(space, rng)
        self.measurer = measurer

    def lower(self, candidates: Iterable[Candidate], limit: int) -> Iterator[tuple[Candidate, Lowered | Failure]]:
        candidates = list(candidates)
        new = [c.state for c in candidates if not self.space.is_recorded(c.digest)]
        if new:
            known = {r.linear for r in self.space.rows.values() if r.linear}
            recorded = measure(new, self.measurer, known, self.space.best)
            append(self.space.name, recorded)
            for state, r in zip(new, recorded, strict=True):
                self.space.rows[state.digest], self.space.state_at[state.digest] = r, state
                if r.seconds:
                    self.space.measured[r.linear] = r
        return super().lower(candidates, limit)


def record_strategies(name: str, count: int, executor: Executor) -> None:
    """Record what a search of `count` measurements by each strategy asks for, with sketches and without."""
    measurer = WorkerMeasurer(kernel_of(name), target(), executor, CONFIG, BenchConfig())
    for strategy, given in product(STRATEGIES, (True, False)):
        space = Space(name)
        before = len(space.measured)
        config = BeamConfig(width=8, strategy=strategy, sketches=given, seed=SEED, patience=count)
        recording = RecordingMeasurer(space, random.Random(SEED), measurer)
        run(space, config, recording, make_strategy, count)
        print(f"{name}: {len(space.measured)} measured, {len(space.measured) - before} of them for {strategy} "
              f"{'with' if given else 'without'} sketches", flush=True)


def record_again(name: str, count: int, executor: Executor) -> None:
    """More samples of the `count` fastest candidates of a kernel: a line more for each, with the same digest."""
    base = Scheduler(kernel_of(name), target())
    measurer = WorkerMeasurer(kernel_of(name), target(), executor, CONFIG, BenchConfig())
    fastest = sorted((r for r in read(name) if r.seconds), key=lambda r: min(r.seconds))[:count]
    for start in range(0, len(fastest), CHUNK):
        chunk = fastest[start:start + CHUNK]
        states = [apply_opts(base, [Opt.from_json(o) for o in r.chain]) for r in chunk]
        candidates = {r.digest: Candidate(s, s.applied_opts, Origin.ACTION, linear=r.linear) for r, s in zip(chunk, states, strict=True)}
        built = []
        for c, code in zip(candidates.values(), measurer.build([*candidates.values()], final=False, deadline=10.0), strict=True):
            if not isinstance(code, Failure):
                c.built = code
                built.append(c)
        for _ in range(AGAIN):
            for c, screened in zip(built, measurer.screen(built, None), strict=True):
                if not isinstance(screened, Failure):
                    c.samples += screened.samples
        append(name, [replace(r, seconds=candidates[r.digest].samples) for r in chunk if candidates[r.digest].samples])
        print(f"{name}: {start + len(chunk)} of {len(fastest)} timed again", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=3000, help="with a time, for each kernel")
    parser.add_argument("--strategies", type=int, default=0, metavar="N", help="record searches of N measurements by each strategy instead")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="take more samples of the N fastest of each kernel instead")
    parser.add_argument("--only", default=",".join(CASES), help="kernels, joined by commas")
    parser.add_argument("--workers", default="local", help="local:N")
    args = parser.parse_args()
    with make_executor(args.workers) as executor:
        if args.strategies or args.again:
            for name in args.only.split(","):
                if args.strategies:
                    record_strategies(name, args.strategies, executor)
                if args.again:
                    record_again(name, args.again, executor)
            return
        for count in sorted({min(step, args.candidates) for step in (500, 1500, args.candidates)}):     # all kernels, then more of each
            for name in args.only.split(","):
                record(name, count, executor)


if __name__ == "__main__":
    main()
