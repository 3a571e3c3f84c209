"""A loop tree computes every position of an output and adds every position of a sum once. The tests execute its nodes without lowering."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import LOOP, Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.nodes import Accumulate, Body, Ends, Frame, Inner, Launch, Loop, PhaseKind, Reduction, Span, Split, Store, Update
from svod.core.tree.passes import PASSES, loop_tree
from svod.errors import KernelOptError
from tests.chains import random_state
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import count
from tests.hand_kernels import HAND

KERNELS = {**CORPUS, **HAND}
CHAINS = 3              # chains of each kernel and target
MOST_POSITIONS = 20_000     # most output positions times positions of the sum of a tested phase
Opened = dict[int, list[int]]       # local axis: positions of its open loops
Position = tuple[int, ...]


def start(frame: Frame, a: int, opened: Opened) -> int:
    """Return the first position of an axis' current tile; the last tile is moved back."""
    at, loops = sum(opened.get(a, [])), [p for p in frame.pieces[a] if p.role == LOOP]
    inside = [p for p in frame.pieces[a] if p.role != LOOP] + loops[len(opened.get(a, [])):]
    span = 1 + sum(p.stride * (p.extent - 1) for p in inside)
    return min(at, max(0, frame.bounds[a] - span)) if frame.ends(a) is Ends.MOVED_BACK and a < frame.num_outs else at


def tile(frame: Frame, axes: range, opened: Opened, extents: tuple[int, ...]) -> list[Position]:
    """List the positions that are unrolled along some axes, as far as they are inside the extents."""
    ways = []
    for a in axes:
        own = [p for p in frame.pieces[a] if p.role != LOOP]
        offsets = [sum(i * p.stride for i, p in zip(at, own, strict=True)) for at in product(*(range(p.extent) for p in own))]
        first = start(frame, a, opened)
        ways.append([first + o for o in offsets if first + o < extents[a] and first + o - first < frame.bounds[a]])
    return list(product(*ways))


class Walk:
    """An interpreter of the loops of one phase. `extents`: the extents of its local axes."""

    def __init__(self, extents: tuple[int, ...], split: Split | None, part: int) -> None:
        self.extents, self.split, self.part = extents, split, part
        self.stored: Counter[Position] = Counter()
        self.summed: dict[Position, Counter[Position]] = {}     # output position: positions of the sum
        self.owners: dict[Position, object] = {}                # output position: iteration that computed it first

    def launch(self, node: Launch) -> None:
        for at in product(*(range(loop.piece.extent) for loop in node.loops)):
            opened: Opened = {}
            for loop, i in zip(node.loops, at, strict=True):
                opened.setdefault(loop.axis, []).append(i * loop.piece.stride)
            is_last = all(i == loop.piece.extent - 1 for loop, i in zip(node.loops, at, strict=True))
            self.body(node.last if node.last is not None and is_last else node.body, opened)

    def body(self, body: Body, opened: Opened) -> None:
        self.inner(body.inner, opened, {})

    def inner(self, node: Inner, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        if isinstance(node, Store):
            self.stored.update(tile(node.frame, range(node.frame.num_outs), opened, self.extents))
        elif isinstance(node, Reduction):
            self.inner(node.inner, opened, self.summed)
        elif isinstance(node, Update):
            self.inner(node.inner, opened, sums)
        elif isinstance(node, Accumulate):
            outs = node.frame.num_outs
            terms = tile(node.frame, range(outs, len(node.frame.pieces)), opened, self.extents)
            for position in tile(node.frame, range(outs), opened, self.extents):
                found = sums.setdefault(position, Counter())
                if self.is_first(position, opened):
                    found.update(terms)
        else:
            self.loop(node, opened, sums)

    def is_first(self, position: Position, opened: Opened) -> bool:
        """Whether the position is computed for the first time: a tile that was moved back computes some of them again."""
        loops = tuple((a, tuple(at)) for a, at in sorted(opened.items()) if a < len(position))
        return self.owners.setdefault(position, loops) == loops

    def loop(self, node: Loop, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        a, frame = node.axis, node.frame
        reduces = a >= frame.num_outs
        is_split = self.split is not None and reduces and a == self.split.axis and node.is_outermost
        if node.span is Span.ALIGNED:
            self.aligned(node, opened, sums)
            return
        if node.span is Span.ONCE:
            iterations: Iterator[int] = iter([0])
        elif reduces:
            first, end = 0, node.whole * node.stride
            if is_split and self.split is not None:
                first, end = self.part * self.split.chunk, min(end, (self.part + 1) * self.split.chunk)
            iterations = iter(range(first, end, node.stride))
        else:
            stop = node.loop.piece.extent * node.loop.piece.stride
            if opened.get(a) and frame.ends(a) is not Ends.EXACT:       # nothing begins beyond the end
                stop = min(stop, frame.bounds[a] - sum(opened[a]))
            iterations = iter(range(0, stop, node.loop.piece.stride))
        for at in iterations:
            self.inside(node.body, a, at, opened, sums)
        if not is_split or (self.split is not None and self.part == self.split.parts - 1):
            for tail in node.tails:
                self.inside(tail.body, a, node.whole * node.stride, opened, sums)

    def aligned(self, node: Loop, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        """A loop nest over a row that begins at any address: after three positions the vectors are aligned."""
        extent, width, step, a = node.frame.bounds[node.axis], node.frame.width, node.loop.piece.stride, node.axis
        first = 3
        rest = first + (extent - first) // step * step
        for body, bounds in ((node.tails[0].body, range(0, first, width)), (node.body, range(first, rest, step)),
                             (node.tails[0].body, range(rest, extent, width))):
            for at in bounds:
                self.inside(body, a, at, opened, sums)

    def inside(self, body: Body, a: int, at: int, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        self.inner(body.inner, {**opened, a: [*opened.get(a, []), at]}, sums)


def check(state: Scheduler) -> int:
    """Check the phase of the output; returns the number of its positions, or 0 if it has too many or skips some."""
    kernel = state.kernel
    phase = next(p for p in loop_tree(state) if p.kind in (PhaseKind.OUTPUT, PhaseKind.PARTIAL))
    r = phase.launch.frame.r
    extents = tuple(kernel.axes[a].extent for a in r.axes)
    total = 1
    for e in extents:
        total *= e
    if total > MOST_POSITIONS or any(kernel.axes[a].bound is not None for a in r.axes):
        return 0
    outs = set(product(*(range(e) for e in extents[:phase.launch.frame.num_outs])))
    sums: dict[Position, Counter[Position]] = {}
    for part in range(phase.split.parts if phase.split else 1):
        walk = Walk(extents, phase.split, part)
        walk.launch(phase.launch)
        if not r.reductions:
            assert set(walk.stored) == outs
            return len(outs)
        for position, terms in walk.summed.items():
            sums.setdefault(position, Counter()).update(terms)
    assert set(sums) == outs
    every = Counter(product(*(range(e) for e in extents[phase.launch.frame.num_outs:])))
    for position, terms in sums.items():
        assert terms == every, (position, terms - every, every - terms)
    return len(outs)


def test_without_tails_terms_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = apply_opts(Scheduler(Kernel(kernel_of(data(6, 70).sum(1))), AVX2), [Opt("UNROLL", "r0", 4)])
    assert check(state) == 6
    monkeypatch.setattr("svod.core.tree.passes.PASSES", tuple(p for p in PASSES if p.name != "tails"))
    with pytest.raises(AssertionError):
        check(state)


@pytest.mark.slow
@pytest.mark.parametrize("target", [replace(AVX512, threads=4), AVX2], ids=["avx512", "avx2"])
def test_every_position_is_computed_and_every_term_added_once(target: Target) -> None:
    checked = 0
    for name, ast in KERNELS.items():
        kernel = Kernel(ast())
        if kernel.library_kernel is not None:
            continue
        for seed in range(count(CHAINS)):
            rng = random.Random(f"coverage {name} {seed}")
            state = random_state(rng, Scheduler(kernel, target), rng.randint(1, 10))
            try:
                found = check(state)
            except KernelOptError:      # placements that an opt has moved since
                continue
            except AssertionError as e:
                raise AssertionError(f"{name}: {[o.to_json() for o in state.applied_opts]}") from e
            checked += bool(found)
    assert checked >= len(KERNELS), "most chains are checked"
