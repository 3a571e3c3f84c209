"""Prefetches: loads prefetch the data that a later iteration will read (PREFETCH).

    Loop r0 by 2                Loop r0 by 2
      Accumulate         →        Prefetch p1, 4 iterations ahead
                                  Accumulate

Iterations are those of the innermost loop that moves the load. A load is not prefetched if that loop also moves an index that is itself
loaded, or if no loop moves it. A prefetch outside of the argument does nothing, so it may go past the end of a row. Groups of threads
prefetch nothing: while one thread waits for memory, others compute."""
from __future__ import annotations

from typing import NamedTuple

from svod.core.kernel.kernel import Node
from svod.core.kernel.loop_nest import StageNest
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Accumulate, Body, Compute, Frame, Inner, Launch, Loop, Part, Phase, Prefetch, Reduction, Span, Update


def prefetches(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Let the loads of all phases prefetch; phases come back unchanged if the state prefetches nothing."""
    if not maker.state.prefetch or maker.state.target.has_groups:
        return phases
    return tuple([p._replace(launch=_Prefetches(maker).launch(p.launch)) for p in phases])


class Moving(NamedTuple):
    """A loop that runs around a body. `step`: positions of its axis from one iteration to the next."""

    frame: Frame
    axis: int
    step: int


Around = tuple[Moving, ...]     # outermost first


class _Prefetches:
    """Finds the prefetches of all bodies of a phase."""

    def __init__(self, maker: TreeMaker) -> None:
        kernel, roots = maker.kernel, maker.placement.roots     # staged values inside loops are in a cache anyway
        loads = {f"p{slot}": ("load", slot) for slot in range(len(kernel.params))} | {kernel.stages[s].name: ("read", s) for s in roots}
        self.maker, self.ahead = maker, {loads[name]: (name, n) for name, n in maker.state.prefetch if name in loads}

    # -- bodies -----------------------------------------------------------------------------------------
    def launch(self, node: Launch) -> Launch:
        """Add prefetches to the bodies of a launch. From one iteration of a launch to the next, its innermost loop moves."""
        around = tuple([Moving(node.frame, loop.axis, loop.piece.stride) for loop in node.loops if loop.piece.extent > 1][-1:])
        return node._replace(body=self.body(node.body, None, around), last=node.last and self.body(node.last, None, around),
                             partly=None if node.partly is None else self._parts(node.partly, around))

    def _parts(self, parts: tuple[Part, ...] | Body, around: Around) -> tuple[Part, ...] | Body:
        if isinstance(parts, Body):
            return self.body(parts, None, around)
        return tuple([p._replace(inside=self._parts(p.inside, (*around, Moving(p.frame, p.axis, p.step)))) for p in parts])

    def body(self, body: Body, nest: StageNest | None, around: Around) -> Body:
        """Add prefetches to a body and the bodies in it. `nest`: nest of the body's stage; None for the stage that the phase stores."""
        return body._replace(stages=tuple([self._compute(c, around) for c in body.stages]), inner=self._inner(body.inner, nest, around),
                             prefetches=self._found(body, nest, around))

    def _compute(self, node: Compute, around: Around) -> Compute:
        return node._replace(before=tuple([self._compute(c, around) for c in node.before]),
                             body=node.body and self.body(node.body, node.nest, around))

    def _inner(self, node: Inner, nest: StageNest | None, around: Around) -> Inner:
        if isinstance(node, Loop):
            return self._loop(node, nest, around)
        return node._replace(inner=self._inner(node.inner, nest, around)) if isinstance(node, (Reduction, Update)) else node

    def _loop(self, node: Loop, nest: StageNest | None, around: Around) -> Loop:
        """Add prefetches to the bodies of a loop. A body that runs once, such as the tail of a sum of known extent, moves no load."""
        is_sum, reach = node.axis >= node.frame.num_outs, node.frame.reach(node.axis)
        step, once = node.stride if is_sum else node.loop.piece.stride, (Span.ONCE, Span.NEVER)

        def inside(body: Body, frame: Frame, by: int) -> Body:
            return self.body(body, nest, (*around, Moving(frame, node.axis, by)) if by else around)
        tails = [t._replace(body=inside(t.body, t.body.frame, 0 if node.span in (Span.ALL, *once) else t.step if t.step < reach else step))
                 for t in node.tails]
        is_single = node.span in once or (node.span is Span.ALL and is_sum and node.whole == 1)
        return node._replace(body=inside(node.body, node.frame, 0 if is_single else step), tails=tuple(tails))

    # -- loads ------------------------------------------------------------------------------------------
    def _found(self, body: Body, nest: StageNest | None, around: Around) -> tuple[Prefetch, ...]:
        """The prefetches of the loads that the reduction or statement at the end of a body evaluates."""
        frame, inner, found = body.frame, body.inner, list[Prefetch]()
        if isinstance(inner, Reduction):        # results are stored in loops over the accumulators in memory
            loops = [frame.loops[j] for j in inner.in_memory]
            around = (*around, *[Moving(frame, loop.axis, loop.piece.stride) for loop in loops if loop.piece.extent > 1])
        for n, node in enumerate(frame.r.nodes):
            asked = self.ahead.get((node.kind, node.arg)) if node.kind in ("load", "read") else None
            if asked is not None and any(a >= frame.num_outs for a in node.deps) in _evaluated(inner):
                found.append(Prefetch(n, *asked, self._step(frame, node, nest, around)))
        return tuple([p for p in found if p.step])

    def _step(self, frame: Frame, node: Node, nest: StageNest | None, around: Around) -> int:
        """How many elements further a load reads in the next iteration of the innermost loop that moves it; 0 if no loop does, or if that
        is not known."""
        dims = (node.linear,) if node.linear is not None else node.dims
        for number in reversed(range(len(around))):
            moved = self._moved(frame, nest, around, number)
            if any(moved.get(a) for lin in dims for n, _ in lin.atoms for a in frame.r.nodes[n].deps):
                return 0
            steps = [sum([c * moved.get(a, 0) for a, c in lin.coefs]) for lin in dims]
            layout = self.maker.nest.stages[node.arg].layout if node.kind == "read" else None
            step = steps[0] if layout is None else layout.place(steps)
            if step:
                return step
        return 0

    def _moved(self, frame: Frame, nest: StageNest | None, around: Around, number: int) -> dict[int, int]:
        """Local axis of a stage → how many positions it advances in one iteration of loop number `number` of `around`."""
        loop, s = around[number], around[number].frame.r.stage.index
        if s == frame.r.stage.index or nest is None:
            return {loop.axis: loop.step}
        pieces = next(one.frame for one in reversed(around) if one.frame.r.stage.index == s).pieces[loop.axis]
        return {a: loop.step * next((terms[p.row] // p.stride for p in pieces if p.row in terms), 0)
                for a, ((terms, _), _) in enumerate(nest.written)}


def _evaluated(node: Inner) -> tuple[bool, ...]:
    """Which loads of a stage the end of a body evaluates: those that depend on reduce axes (True), the others (False), or both."""
    if isinstance(node, Loop):
        return ()
    if isinstance(node, (Reduction, Update)):
        return (*[False] * isinstance(node, Reduction), *_evaluated(node.inner))
    return (isinstance(node, Accumulate),)
