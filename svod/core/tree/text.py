"""A loop tree as text, one line for each node, to show the result of a pass.

    phase out, output
      launch o0 by 16 (7)
        reduction
          loop r0 by 4 (17)
            accumulate 16 × 4
          tail of 2
            accumulate 16 × 2
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import UNROLL, UPCAST
from svod.core.tree.nodes import (
    Accumulate,
    Barrier,
    Begin,
    Body,
    Compute,
    Counters,
    Ends,
    Fetch,
    Frame,
    Inner,
    Launch,
    Load,
    Loop,
    Part,
    Phase,
    Reduction,
    Span,
    Step,
    Tail,
    Turns,
    Update,
    When,
)

INDENT = "  "
Line = tuple[int, str]      # depth, text


def format_tree(kernel: Kernel, tree: tuple[Phase, ...]) -> str:
    """The text of a kernel's loop tree."""
    return "\n".join(INDENT * depth + text for depth, text in _Text(kernel).phases(tree))


class _Text:
    """Writes nodes as lines. Axes and stages have the names that opts use."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def phases(self, tree: tuple[Phase, ...]) -> Iterator[Line]:
        for phase in tree:
            split = f", {phase.split.parts} parts of {phase.split.chunk} positions" if phase.split else ""
            yield 0, f"phase {self.kernel.stages[phase.stage].name}, {phase.kind.value}{split}{', once' if phase.is_once else ''}"
            yield from self._launch(phase.launch, 1)

    def _launch(self, node: Launch, depth: int) -> Iterator[Line]:
        loops = [f"{self._axis(node.frame, a)}{_by(piece.stride)} ({piece.extent})" for a, piece, _ in node.loops]
        first = [self._axis(node.frame, a) for a in sorted(node.longest_first)]
        yield depth, f"launch {', '.join(loops) or 'once'}{', last first along ' * bool(first)}{', '.join(first)}" \
            + ", stored past the caches" * node.is_non_temporal
        if node.partly is None and node.last is None:
            yield from self._body(node.body, depth + 1)
            return
        yield depth + 1, "all positions inside" if node.partly is not None else "aligned vectors"
        yield from self._body(node.body, depth + 2)
        if node.partly is not None:
            yield depth + 1, "some positions inside"
            yield from self._parts(node.partly, depth + 2)
        if node.last is not None:
            yield depth + 1, "last iteration"
            yield from self._body(node.last, depth + 2)

    def _parts(self, parts: tuple[Part, ...] | Body, depth: int) -> Iterator[Line]:
        if isinstance(parts, Body):
            yield from self._body(parts, depth)
            return
        for part in parts:
            yield depth, f"the rest of {self._axis(part.frame, part.axis)}{_by(part.step)}{_when(part.when)}"
            yield from self._parts(part.inside, depth + 1)

    def _body(self, body: Body, depth: int) -> Iterator[Line]:
        for node in body.stages:
            yield from self._compute(node, depth, "")
        yield from [(depth, "barrier")] * body.barrier
        for source, ahead in dict.fromkeys((p.source, p.ahead) for p in body.prefetches):
            yield depth, f"prefetch {source}, {ahead} iteration{'s' * (ahead > 1)} ahead"
        yield from self._inner(body.inner, depth)

    def _compute(self, node: Compute, depth: int, note: str) -> Iterator[Line]:
        kind = "operand" if node.in_place else "copy" if is_derived(node.nest.r.stage) else "stage"
        note = (_turns(node.turns) if node.turns is not None else "") + note
        yield from [(depth, "barrier")] * node.barrier_first
        yield depth, f"{kind} {node.nest.r.stage.name}[{', '.join(map(str, node.nest.region))}], {node.nest.space.name.lower()}{note}"
        for inside in node.before:
            yield from self._compute(inside, depth + 1, "")
        yield from [(depth + 1, "barrier")] * node.barrier_to_store
        if node.body is not None and node.turns is None:
            yield from self._body(node.body, depth + 1)

    def _inner(self, node: Inner, depth: int) -> Iterator[Line]:
        if isinstance(node, Loop):
            yield from self._loop(node, depth)
        elif isinstance(node, Reduction):
            memory = [self._axis(node.frame, node.frame.loops[j].axis) for j in node.in_memory]
            yield depth, f"reduction{', accumulators in memory along ' * bool(memory)}{', '.join(memory)}"
            yield from self._inner(node.inner, depth + 1)
            yield from [(depth + 1, "barrier")] * node.barrier
            if node.through_memory:
                yield depth + 1, "partial results of threads to shared memory"
                yield depth + 1, "barrier"
        elif isinstance(node, Update):
            yield depth, "update of memory" + ", by a block" * node.in_block
            yield from self._inner(node.inner, depth + 1)
        else:
            verb, blocks = ("accumulate", node.blocks) if isinstance(node, Accumulate) else ("store", ())
            yield depth, f"{verb}{self._tile(node.frame)}{_blocks(blocks)}"

    def _loop(self, node: Loop, depth: int) -> Iterator[Line]:
        a, frame = node.axis, node.frame
        count = node.whole if a >= frame.num_outs else node.loop.piece.extent
        span = "" if node.span is Span.ALL else f", {node.span.value}"
        ends = ", the last tile moved back" if frame.ends(a) is Ends.MOVED_BACK or node.is_moved_back else ""
        skips = ", skipping what adds nothing" if node.window is not None or node.limits else ""
        yield depth, f"loop {self._axis(frame, a)}{_by(node.stride)} ({count}){span}{ends}{_blocks(node.blocks)}{skips}"
        if node.pipeline is not None:
            for copy in node.pipeline.copies:
                how = " in bulk" if copy.is_bulk else " by way of registers" if not copy.is_async else ""
                yield from self._compute(copy.compute, depth + 1, f", ahead{how}")
            yield depth + 1, f"prologue, i = 0: {', '.join(map(_step, node.pipeline.prologue))}"
            yield depth + 1, f"each iteration i: {', '.join(map(_step, node.pipeline.body))}"
            for count, steps in groupby(node.pipeline.between, itemgetter(0)):
                yield depth + 1, f"after {count} products: {', '.join([_step(step) for _, step in steps])}"
            yield depth + 1, f"epilogue: {', '.join(map(_step, node.pipeline.epilogue))}"
        yield from self._body(node.body, depth + 1)
        for tail in node.tails:
            yield from self._tail(tail, depth)

    def _tail(self, node: Tail, depth: int) -> Iterator[Line]:
        yield depth, f"tail of {node.step}{_when(node.when)}"
        yield from self._body(node.body, depth + 1)

    def _tile(self, frame: Frame) -> str:
        """The extents of the tile by axis, of both upcast and unrolled loops; "" if there are none."""
        sizes = [f"{self._axis(frame, a)} {p.extent}" for a, own in enumerate(frame.pieces) for p in own
                 if p.extent > 1 and p.role in (UPCAST, UNROLL)]
        return f" {' × '.join(sizes)}" if sizes else ""

    def _axis(self, frame: Frame, a: int) -> str:
        axis = frame.r.axes[a]
        return self.kernel.axes[axis].name if axis >= 0 else "part"


def _by(step: int) -> str:
    return f" by {step}" if step > 1 else ""


def _when(when: When) -> str:
    return "" if when is When.ANY else f", where {when.value} are left"


def _step(step: Step) -> str:
    """A step of a pipelined loop."""
    if isinstance(step, Fetch):
        return f"{'barrier, ' * step.barrier}{'copy' if step.begins else 'prepare copies'} for i{_plus(step.ahead)}"
    if isinstance(step, Load):
        return f"load operands of {len(step.products)} products of i{_plus(step.ahead)}"
    if isinstance(step, Begin):
        return "begin copies" + f", part {step.part + 1} of {step.parts}" * (step.parts > 1)
    if isinstance(step, Counters):
        return f"{'release' if step.ends else 'set up'} counters"
    return "barrier" if isinstance(step, Barrier) else f"wait for all commits but {step.left}"


def _plus(ahead: int) -> str:
    return f" + {ahead}" if ahead else ""


def _turns(turns: Turns) -> str:
    """How the threads of a group share a copy."""
    count = turns.whole + (turns.rest > 0)
    how = f"a loop of {turns.whole} turns{' and one more' * (turns.rest > 0)}" if turns.is_loop else f"{count} turn{'s' * (count > 1)}"
    return f", {turns.parts} parts by {turns.threads} threads in {how}"


def _blocks(sizes: tuple[int, ...]) -> str:
    return f", in blocks of {' of '.join(map(str, reversed(sizes)))}" if sizes else ""
