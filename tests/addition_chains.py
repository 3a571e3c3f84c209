"""The longest chain of additions in LINEAR, read from a program without running it.

For each value, the longest paths of additions are tracked: from each accumulator of an open loop, and from terms. An accumulator that a
loop carries grows by its own path in each iteration. One in scratch grows by its own path in each iteration of the loops whose index does
not change its position, since it was set to a value that does not depend on it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from svod.compile.lower.intervals import Interval, intervals
from svod.compile.lower.program import Instruction, PhaseSpec, Program

ADDS = frozenset({"ADD", "SUB", "MULACC", "DOT", "TILEDOT", "MMA", "MMASHARED"})
TERM = "term"
Paths = dict[Any, int]      # most additions from each accumulator, and from terms


class Chains(NamedTuple):
    """The longest addition chains of a program, over its float accumulators."""

    longest: int        # additions in a row to one accumulator
    path: int           # additions between a term and any value


def addition_chains(program: Program) -> Chains:
    """The longest chain and the longest path over all phases of a program."""
    found = [_Phase(phase, code).walk() for phase, code in zip(program.spec.phases, program.code, strict=True)]
    return Chains(max(c.longest for c in found), max(c.path for c in found))


class _Phase:
    def __init__(self, phase: PhaseSpec, code: Sequence[Instruction]) -> None:
        self.phase, self.code = phase, code
        self.values: list[Interval] = intervals(phase, code)
        self.paths: list[Paths] = []
        self.open: list[int] = []                               # the open loops
        self.results: dict[int, list[Paths]] = {}               # loop → paths of the values that it carries
        self.moved: list[frozenset[int]] = []                   # loops that an index depends on
        self.set_in: dict[Any, tuple[int, ...]] = {}            # position in scratch → the loops in which it was last set
        self.longest = 0

    def walk(self) -> Chains:
        for n, (op, dtype, _, src, arg) in enumerate(self.code):
            self.moved.append(frozenset({n} if op == "LOOP" else ()).union(*(self.moved[s] for s in src)))
            self.paths.append(self._of(n, op, src, arg) if dtype.is_float or op in ("ENDLOOP", "STORE") else {})
            if op == "LOOP":
                self.open.append(n)
        return Chains(self.longest, max((p.get(TERM, 0) for p in self.paths), default=0))

    def _of(self, n: int, op: str, src: tuple[int, ...], arg: Any) -> Paths:
        if op == "CARRY":
            return {(src[0], arg): 0}
        if op == "ENDLOOP":
            self._close(src[0], [self.paths[s] for s in src[1:]])
            return {}
        if op == "RESULT":
            return self.results[src[0]][arg]
        if op in ("LOAD", "TILELOAD"):
            return {self._place(src, arg): 0, TERM: 0} if self.code[src[0]].op == "SCRATCH" else {TERM: 0}
        if op in ("STORE", "TILESTORE"):
            if self.code[src[0]].op == "SCRATCH" and self.code[src[2]].dtype.is_float:
                self._set(self._place(src, arg), self.moved[src[1]], self.paths[src[2]])
            return {}
        merged: Paths = {TERM: 0}
        for s in src:
            for key, additions in self.paths[s].items():
                merged[key] = max(merged.get(key, 0), additions + (op in ADDS))
        return merged

    def _place(self, src: tuple[int, ...], arg: Any) -> Any:
        return ("scratch", self.code[src[0]].arg, src[1], arg if isinstance(arg, int) else arg[0])

    def _set(self, place: Any, moved: frozenset[int], value: Paths) -> None:
        own = next((v for k, v in value.items() if isinstance(k, tuple) and k[:2] == place[:2]), None)
        if own is None:
            self.set_in[place[:2]] = tuple(self.open)
            return
        before = self.set_in.get(place[:2], ())
        common = next((k for k, (a, b) in enumerate(zip(before, self.open, strict=False)) if a != b), min(len(before), len(self.open)))
        times = 1
        for loop in self.open[common:]:
            times *= 1 if loop in moved else self._trips(loop)
        self.longest = max(self.longest, own * times)

    def _close(self, loop: int, following: list[Paths]) -> None:
        self.open.pop()
        trips, first = self._trips(loop), self.code[loop].src[2:]
        self.results[loop] = []
        for k, value in enumerate(following):
            own = value.get((loop, k), 0)
            self.longest = max(self.longest, own * trips)
            result: Paths = {}
            # a term added in an iteration passes the additions of later iterations; the loop's first value passes those of all iterations
            for key, additions in (*((key, n + own * max(trips - 1, 0)) for key, n in value.items()),
                                   *((key, n + own * trips) for key, n in self.paths[first[k]].items())):
                if not (isinstance(key, tuple) and key[0] == loop):
                    result[key] = max(result.get(key, 0), additions)
            self.results[loop].append(result)

    def _trips(self, loop: int) -> int:
        start, stop = self.code[loop].src[:2]
        return max(0, -(-self._apart(start, stop) // self.code[loop].arg))

    def _apart(self, start: int, stop: int) -> int:
        """The largest difference between `stop` and `start`."""
        op, _, _, src, _ = self.code[stop]
        if op == "MIN":
            return min(self._apart(start, s) for s in src)
        if op == "ADD" and start in src:
            other = src[1] if src[0] == start else src[0]
            return self.values[other][1]
        return self.values[stop][1] - self.values[start][0]
