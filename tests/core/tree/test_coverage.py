"""A loop tree computes every position of an output and adds every position of a sum once. The tests execute its nodes without lowering."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import pytest

from svod import Variable
from svod.core.ir.symbolic import const, simplify, vmax
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import LOOP, Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import (
    Accumulate,
    Body,
    Ends,
    Frame,
    Inner,
    Launch,
    Loop,
    Part,
    PhaseKind,
    Prefetch,
    Reduction,
    Span,
    Split,
    Store,
    Tail,
    Update,
    When,
    with_bodies,
    with_loops,
)
from svod.core.tree.passes import PASSES, Tree, TreePass, loop_tree
from svod.core.tree.tails import FEW_ROWS, is_split
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.chains import random_state
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import a_half, count
from tests.hand_kernels import HAND

KERNELS = {**CORPUS, **HAND}
CHAINS = 3              # chains of each kernel and target
MOST_POSITIONS = 20_000     # most output positions times positions of the sum of a tested phase
Opened = dict[int, list[int]]       # local axis: positions of its open loops
Position = tuple[int, ...]


class Walk:
    """An interpreter of the loops of one phase. `extents`: the extents of its local axes; those of the axes in `ended` depend on a
    variable."""

    def __init__(self, extents: tuple[int, ...], ended: frozenset[int], split: Split | None, part: int) -> None:
        self.extents, self.ended, self.split, self.part = extents, ended, split, part
        self.stored: Counter[Position] = Counter()
        self.summed: dict[Position, Counter[Position]] = {}     # output position: positions of the sum
        self.owners: dict[Position, object] = {}                # output position: iteration that computed it first
        self.inside: frozenset[int] = frozenset()               # local axes of which no position is masked
        self.moves_back = False                                 # A tile was moved back, so positions may be computed twice.

    @contextmanager
    def unmasked(self, *axes: int) -> Iterator[None]:
        before, self.inside = self.inside, self.inside.union(axes)
        yield
        self.inside = before

    def start(self, frame: Frame, a: int, opened: Opened) -> int:
        """Return the first position of an axis' current tile; the last tile is moved back."""
        at, loops = sum(opened.get(a, [])), [p for p in frame.pieces[a] if p.role == LOOP]
        tile = [p for p in frame.pieces[a] if p.role != LOOP] + loops[len(opened.get(a, [])):]
        span = 1 + sum(p.stride * (p.extent - 1) for p in tile)
        last = max(0, frame.bounds[a] - span)
        if frame.ends(a) is not Ends.MOVED_BACK or a >= frame.num_outs or at <= last:
            return at
        self.moves_back = True
        return last

    def tile(self, frame: Frame, axes: range, opened: Opened) -> list[Position]:
        """List the positions that are unrolled along some axes, except those that masks leave out."""
        ways = []
        for a in axes:
            own = [p for p in frame.pieces[a] if p.role != LOOP]
            offsets = [sum(i * p.stride for i, p in zip(at, own, strict=True)) for at in product(*(range(p.extent) for p in own))]
            first = self.start(frame, a, opened)
            positions = [first + o for o in offsets if o < frame.bounds[a]]
            assert a not in self.inside or max(positions) < self.extents[a], "a position beyond the extent has no mask"
            ways.append([p for p in positions if p < self.extents[a]])
        return list(product(*ways))

    # -- launches ---------------------------------------------------------------------------------------
    def launch(self, node: Launch) -> None:
        for at in product(*(range(loop.piece.extent) for loop in node.loops)):
            opened: Opened = {}
            for loop, i in zip(node.loops, at, strict=True):
                opened.setdefault(loop.axis, []).append(i * loop.piece.stride)
            is_last = all(i == loop.piece.extent - 1 for loop, i in zip(node.loops, at, strict=True))
            self.iteration(node, node.last if node.last is not None and is_last else node.body, opened)

    def iteration(self, node: Launch, body: Body, opened: Opened) -> None:
        """An iteration of a launch: nothing, all, or parts of it, by the positions that are left of the axes that a variable ends."""
        left = {a: self.extents[a] - sum(at) for a, at in opened.items() if a in self.ended}
        if any(n < 1 for n in left.values()):
            return
        room = {a: self.extents[a] if a in node.moved_back else left[a] for a in node.ended}
        if all(node.frame.reach(a) <= n for a, n in room.items()):
            for a in node.moved_back:
                self.moves_back |= left[a] < node.frame.reach(a)
                opened = {**opened, a: [min(sum(opened[a]), room[a] - node.frame.reach(a))]}
            with self.unmasked(*node.ended):
                self.inner(body.inner, opened, {})
        elif node.partly is not None:
            with self.unmasked(*[a for a in node.ended if node.frame.reach(a) == 1]):
                self.parts(node, node.partly, opened, left)

    def parts(self, node: Launch, parts: tuple[Part, ...] | Body, opened: Opened, left: dict[int, int]) -> None:
        if isinstance(parts, Body):
            self.inner(parts.inner, opened, {})
            return
        for part in parts:
            a = part.axis
            rest = min(node.frame.reach(a), left[a])
            for at in range(0, rest if runs(part.when, rest) else 0, part.step):
                with self.unmasked(*[a] * (part.step == 1)):
                    self.parts(node, part.inside, {**opened, a: [opened[a][0] + at, *opened[a][1:]]}, left)

    # -- loops ------------------------------------------------------------------------------------------
    def inner(self, node: Inner, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        if isinstance(node, Store):
            self.stored.update(self.tile(node.frame, range(node.frame.num_outs), opened))
        elif isinstance(node, Reduction):
            self.inner(node.inner, opened, self.summed)
        elif isinstance(node, Update):
            self.inner(node.inner, opened, sums)
        elif isinstance(node, Accumulate):
            outs = node.frame.num_outs
            terms = self.tile(node.frame, range(outs, len(node.frame.pieces)), opened)
            for position in self.tile(node.frame, range(outs), opened):
                found = sums.setdefault(position, Counter())
                if self.is_first(position, opened):
                    found.update(terms)
                else:
                    assert self.moves_back, f"{position} is computed twice"
        elif node.axis in self.ended and node.span in (Span.TO_LIMIT, Span.WHOLE):
            self.ended_loop(node, opened, sums)
        else:
            self.loop(node, opened, sums)

    def is_first(self, position: Position, opened: Opened) -> bool:
        """Whether the position is computed for the first time: a tile that was moved back computes some of them again."""
        loops = tuple((a, tuple(at)) for a, at in sorted(opened.items()) if a < len(position))
        return self.owners.setdefault(position, loops) == loops

    def loop(self, node: Loop, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        a, frame = node.axis, node.frame
        reduces = a >= frame.num_outs
        if node.span is Span.ALIGNED:
            self.aligned(node, opened, sums)
            return
        if node.span is Span.ONCE:
            iterations: Iterator[int] = iter([0])
        elif reduces:
            iterations = iter(range(*self.part_of(node, node.whole * node.stride), node.stride))
        else:
            stop = node.loop.piece.extent * node.loop.piece.stride
            if opened.get(a) and frame.ends(a) is not Ends.EXACT:       # nothing begins beyond the end
                stop = min(stop, frame.bounds[a] - sum(opened[a]))
            iterations = iter(range(0, stop, node.loop.piece.stride))
        for at in iterations:
            self.within(node.body, a, at, opened, sums)
        if self.split is None or not is_split(self.split, node) or self.part == self.split.parts - 1:
            for tail in node.tails:
                self.within(tail.body, a, node.whole * node.stride, opened, sums)

    def part_of(self, node: Loop, end: int) -> tuple[int, int]:
        """The bounds of a reduce loop to `end`: those of one part of a sum that is split."""
        if self.split is None or not is_split(self.split, node):
            return 0, end
        return self.part * self.split.chunk, min(end, (self.part + 1) * self.split.chunk)

    def ended_loop(self, node: Loop, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        """A loop over an axis that a variable ends: its whole iterations, then its tails."""
        a, frame, room = node.axis, node.frame, self.extents[node.axis] - sum(opened.get(node.axis, []))
        reduces, reach, step = a >= frame.num_outs, frame.reach(a), node.stride if a >= frame.num_outs else node.loop.piece.stride
        if reduces:
            start, stop = self.part_of(node, -(-frame.left(a, frame.number_of(node.loop)) // step) * step)
        else:
            start, stop = 0, node.loop.piece.extent * step
        stop = min(stop, room)
        if node.span is Span.TO_LIMIT:
            for at in range(start, stop, step):
                self.within(node.body, a, at, opened, sums)
            return
        if node.is_moved_back:
            middle = stop if reach <= room else 0
        else:
            middle = max(0, min(stop, (room + step - reach) // step * step)) if node.tails else stop
        with self.unmasked(a):
            for at in range(start, middle, step):
                self.moves_back |= node.is_moved_back and at > room - reach
                self.within(node.body, a, min(at, room - reach) if node.is_moved_back else at, opened, sums)
        for tail in node.tails:
            end = stop if runs(tail.when, stop - middle) else 0
            with self.unmasked(*[a] * (tail.step == 1)):
                for at in range(max(start, middle), end, tail.step if tail.step < reach else step):
                    self.within(tail.body, a, at, opened, sums)

    def aligned(self, node: Loop, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        """A loop nest over a row that begins at any address: after three positions the vectors are aligned."""
        extent, width, step, a = node.frame.bounds[node.axis], node.frame.width, node.loop.piece.stride, node.axis
        first = 3
        rest = first + (extent - first) // step * step
        self.moves_back = True
        for body, bounds in ((node.tails[0].body, range(0, first, width)), (node.body, range(first, rest, step)),
                             (node.tails[0].body, range(rest, extent, width))):
            for at in bounds:
                self.within(body, a, at, opened, sums)

    def within(self, body: Body, a: int, at: int, opened: Opened, sums: dict[Position, Counter[Position]]) -> None:
        self.inner(body.inner, {**opened, a: [*opened.get(a, []), at]}, sums)


def runs(when: When, rest: int) -> bool:
    """Return whether a tail runs if `rest` positions are left."""
    return when is When.ANY or (when is When.FEW) == (rest <= FEW_ROWS)


def check(state: Scheduler, values: dict[str, int] | None = None) -> int:
    """Check the phase of the output; returns the number of its positions, or 0 if it has too many. `values`: of the kernel's variables."""
    kernel = state.kernel
    phase = next(p for p in loop_tree(state) if p.kind in (PhaseKind.OUTPUT, PhaseKind.PARTIAL))
    r, num_outs = phase.launch.frame.r, phase.launch.frame.num_outs
    extents = tuple(extent_of(kernel, a, values or {}) for a in r.axes)
    if prod(extents) > MOST_POSITIONS:
        return 0
    ended = frozenset(i for i, a in enumerate(r.axes) if kernel.axes[a].bound is not None)
    outs = set(product(*(range(e) for e in extents[:num_outs])))
    sums: dict[Position, Counter[Position]] = {}
    for part in range(phase.split.parts if phase.split else 1):
        walk = Walk(extents, ended, phase.split, part)
        walk.launch(phase.launch)
        assert not (walk.moves_back and kernel.written), "the kernel reads what a tile that was moved back has written"
        if not r.reductions:
            assert set(walk.stored) == outs
            assert walk.moves_back or set(walk.stored.values()) <= {1}, "a position is computed twice"
            return len(outs)
        for position, terms in walk.summed.items():
            sums.setdefault(position, Counter()).update(terms)
    assert set(sums) == outs
    every = Counter(product(*(range(e) for e in extents[num_outs:])))
    for position, terms in sums.items():
        assert terms == every, (position, terms - every, every - terms)
    return len(outs)


def extent_of(kernel: Kernel, axis: int, values: dict[str, int]) -> int:
    """Return the extent of an axis of a kernel at some values of its variables."""
    bound = kernel.axes[axis].bound
    if bound is None:
        return kernel.axes[axis].extent
    return vmax(simplify(bound, {u: const(values[u.arg[0]]) for u in bound.toposort() if u.op is Ops.DEFINE_VAR}))


def test_without_tails_terms_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = apply_opts(Scheduler(Kernel(kernel_of(data(6, 70).sum(1))), AVX2), [Opt("UNROLL", "r0", 4)])
    assert check(state.copy()) == 6
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


# -- extents that depend on variables ---------------------------------------------------------------------
ROWS, COLUMNS = 23, 17
N, M = Variable("n", 1, ROWS), Variable("m", 1, COLUMNS)
A, B, C = data(ROWS, 5), data(5, COLUMNS), data(ROWS, COLUMNS)
ENDED: dict[str, Callable[[], UOp]] = {
    "rows": lambda: kernel_of(A[:N.bind(7)] + 1), "columns": lambda: kernel_of(C[:, :M.bind(7)] * 2),
    "both": lambda: kernel_of(C[:N.bind(7), :M.bind(7)] * 2), "turned": lambda: kernel_of(C[:N.bind(7), :M.bind(7)].T + 1),
    "sum of rows": lambda: kernel_of(A[:N.bind(7)].sum(0)), "sum of columns": lambda: kernel_of(C[:, :M.bind(7)].sum(1)),
    "sum of all": lambda: kernel_of(C[:N.bind(7), :M.bind(7)].sum()), "product": lambda: kernel_of(A[:N.bind(7)] @ B[:, :M.bind(7)]),
    "depth": lambda: kernel_of(A[:N.bind(7)].T @ C[:N.bind(7), :M.bind(7)]), "range": lambda: kernel_of(Tensor.arange(N.bind(7)) * 3),
    "two stages": lambda: kernel_of((A[:N.bind(7)] @ B).relu() @ data(COLUMNS, 3)),
}
VALUES = (1, 2, 3, 5, 6, 7, 11, 13, 16)        # one, below and at common tiles, and primes


@pytest.mark.parametrize("name", a_half(ENDED))
def test_every_position_below_a_variable_is_computed_once(name: str) -> None:
    """Every position is computed at least once, none beyond the extent, and none twice where no tile was moved back."""
    kernel, checked = Kernel(ENDED[name]()), 0
    for seed in range(count(6)):
        rng = random.Random(f"ended {name} {seed}")
        state = random_state(rng, Scheduler(kernel, replace(rng.choice([AVX512, AVX2]), threads=4)), rng.randint(0, 8))
        for n, m in [(1, 1), (ROWS, COLUMNS), *[(rng.choice(VALUES), rng.choice(VALUES)) for _ in range(2)]]:
            try:
                checked += bool(check(state, {"n": n, "m": m}))
            except KernelOptError:      # placements that an opt has moved since
                break
            except AssertionError as e:
                raise AssertionError(f"n = {n}, m = {m}: {[o.to_json() for o in state.applied_opts]}") from e
    assert checked >= count(6) * 2, "most chains are checked"


# -- loops that a pass before tails cuts ------------------------------------------------------------------
def row_by_row(maker: TreeMaker, tree: Tree) -> Tree:
    """Let the remainder of each innermost loop that a variable ends run position by position."""
    def change(node: Loop) -> Loop:
        frame, a = node.frame, node.axis
        if not is_ended(maker, node) or not frame.is_innermost(node.number) or frame.reach(a) == 1:
            return node
        cut = frame.narrowed(a, 1)
        return node._replace(span=Span.WHOLE, tails=(Tail(When.ANY, 1, node.body._replace(inner=in_frame(node.body.inner, cut))),))
    return tuple([p._replace(launch=with_bodies(partial(with_loops, change), p.launch)) for p in tree])


def to_limit(maker: TreeMaker, tree: Tree) -> Tree:
    """Let each loop that a variable ends run up to its end, under guards."""
    def change(node: Loop) -> Loop:
        return node._replace(span=Span.TO_LIMIT) if is_ended(maker, node) else node
    return tuple([p._replace(launch=with_bodies(partial(with_loops, change), p.launch)) for p in tree])


def peeled(maker: TreeMaker, tree: Tree) -> Tree:
    """Peel the remainder of each sum, whose whole iterations run in a loop even if there is only one."""
    def change(node: Loop) -> Loop:
        frame, a = node.frame, node.axis
        if is_ended(maker, node) or a < frame.num_outs or not node.rest:
            return node
        cut = frame.shortened(a, frame.number_of(node.loop), node.rest)
        return node._replace(tails=(Tail(When.ANY, node.rest, node.body._replace(inner=in_frame(node.body.inner, cut))),))
    return tuple([p._replace(launch=with_bodies(partial(with_loops, change), p.launch)) for p in tree])


def is_ended(maker: TreeMaker, node: Loop) -> bool:
    axis = node.frame.r.axes[node.axis]
    return axis >= 0 and maker.kernel.axes[axis].bound is not None


def in_frame(node: Inner, frame: Frame) -> Inner:
    """The end of a body, in another frame."""
    return node._replace(inner=in_frame(node.inner, frame)) if isinstance(node, Update) else node._replace(frame=frame)


def loops_of(tree: Tree) -> list[Loop]:
    found: list[Loop] = []

    def note(node: Loop) -> Loop:
        found.append(node)
        return node
    for p in tree:
        with_bodies(partial(with_loops, note), p.launch)
    return found


@pytest.mark.parametrize("change", [row_by_row, to_limit, peeled])
def test_spans_and_tails_of_a_pass_before_tails_stay(monkeypatch: pytest.MonkeyPatch, change: Callable[[TreeMaker, Tree], Tree]) -> None:
    """Every position is still computed once, and every term added once."""
    kept, plain, kernels = 0, PASSES, {**ENDED, **{name: CORPUS[name] for name in ("gemm", "softmax", "conv3x3", "argmax")}}
    for name, build in kernels.items():
        kernel = Kernel(build())
        for seed in range(count(4)):
            rng = random.Random(f"{change.__name__} {name} {seed}")
            state = random_state(rng, Scheduler(kernel, replace(AVX2, threads=2)), rng.randint(2, 8))
            monkeypatch.setattr("svod.core.tree.passes.PASSES", (plain[0], TreePass("change", "changes", change), *plain[1:]))
            try:
                given = {(n.frame.r.stage.index, n.number): (n.span, [t.step for t in n.tails])
                         for n in loops_of(loop_tree(state, "change")) if n.span is not Span.ALL or n.tails}
                found = loops_of(loop_tree(state, "tails"))
                for values in ({"n": 1, "m": 1}, {"n": ROWS, "m": COLUMNS}, {"n": 7, "m": 13}):
                    check(state.copy(), values)
            except KernelOptError:      # placements that an opt has moved since
                continue
            for node in found:
                own = given.get((node.frame.r.stage.index, node.number))
                assert own is None or own == (node.span, [t.step for t in node.tails]), (name, state.applied_opts)
                kept += own is not None
    assert kept, "no chain has a loop that the pass changed"


# -- bodies of tails --------------------------------------------------------------------------------------
def marked(maker: TreeMaker, tree: Tree) -> Tree:
    """Mark every loop, its body, and the sums inside of it and of its tails."""
    return tuple([p._replace(launch=with_bodies(partial(with_loops, marked_loop), p.launch)) for p in tree])


def marked_loop(node: Loop) -> Loop:
    return node._replace(body=marked_sum(node.body), tails=tuple([t._replace(body=marked_sum(t.body)) for t in node.tails]), blocks=(7,))


def marked_sum(body: Body) -> Body:
    inner = body.inner._replace(blocks=(7,)) if isinstance(body.inner, Accumulate) else body.inner
    return body._replace(inner=inner, prefetches=(Prefetch(0, "p1", 3, 5),))


@pytest.mark.parametrize("name", ["columns", "both", "sum of all", "product", "depth", "two stages", "gemm", "argmax", "softmax"])
def test_what_a_pass_before_tails_marks_is_marked_in_tails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A pass that marks statements gives the same tree before and after `tails`."""
    kernel, tails = Kernel((ENDED | CORPUS)[name]()), 0
    launched, made = PASSES[:2]
    for seed in range(count(6)):
        rng = random.Random(f"marks {name} {seed}")
        state = random_state(rng, Scheduler(kernel, replace(AVX2, threads=4)), rng.randint(2, 8))
        trees = []
        for order in ((launched, TreePass("mark", "marks", marked), made), (launched, made, TreePass("mark", "marks", marked))):
            monkeypatch.setattr("svod.core.tree.passes.PASSES", order)
            try:
                trees.append(loop_tree(state, order[-1].name))     # a tree up to a named pass is made anew each time
            except KernelOptError:      # placements that an opt has moved since
                break
        if trees:
            before, after = trees
            assert before == after, state.applied_opts
            tails += str(before).count("Tail(") + str(before).count("Part(")
    assert tails, "some loops have tails"
