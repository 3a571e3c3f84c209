"""Blocks: long sums of floats are cut, so that rounding errors stay small (`svod.core.ir.summation`).

    Reduction                       Reduction
      Loop r0 (4096)          →       Loop r0 (4096), blocks of 64
        Accumulate                      Accumulate

Each block sums into new accumulators, which are then added to the accumulators of the loops around it. Accumulators that lie in memory are
read and written once per run of the inner loops; each such run may be a block too."""
from __future__ import annotations

from math import prod

from svod.core.ir.summation import BlockedLoop, BlockedNest, blocked_nest
from svod.core.kernel.numerics import CanonicalSum, canonical_sum
from svod.core.kernel.opts.sums import block_sizes
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import UNROLL
from svod.core.machine.target import SAME
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Accumulate, Body, Compute, Inner, Loop, Phase, Reduction, Split, Update, with_bodies
from svod.core.tree.tails import is_split
from svod.errors import KernelOptError


def blocks(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Cut the long sums of all phases into blocks; phases come back unchanged if no stage has a rule for its sums."""
    if all(stage.sum_rule is None for stage in maker.kernel.stages):
        return phases
    return tuple([p._replace(launch=with_bodies(_Blocks(maker, p.split).body, p.launch)) for p in phases])


class _Blocks:
    """Cuts the sums of one phase. `split`: how cores or groups share its reduction; None if they do not."""

    def __init__(self, maker: TreeMaker, split: Split | None) -> None:
        self.kernel, self.split = maker.kernel, split
        self.in_order = maker.state.target.numerics == SAME

    def body(self, body: Body) -> Body:
        """Cut the sums in the stages and in the loop of a body."""
        return body.holding(self._stages(body), self._inner(body.inner))

    def _stages(self, body: Body) -> tuple[Compute, ...]:
        return tuple([self._compute(c) for c in body.stages]) if body.stages else ()

    def _compute(self, node: Compute) -> Compute:
        if is_derived(node.nest.r.stage):       # a copy has no sums
            return node._replace(before=tuple([self._compute(c) for c in node.before])) if node.before else node
        assert node.body is not None
        body = self.body(node.body)
        return node if body is node.body else node._replace(body=body)

    def _inner(self, node: Inner) -> Inner:
        if isinstance(node, Loop):
            return node.around(self.body(node.body), node.span, tuple([t._replace(body=self.body(t.body)) for t in node.tails]))
        return self._reduction(node) if isinstance(node, Reduction) else node

    def _reduction(self, node: Reduction) -> Reduction:
        nest = self._nest(node)
        if nest is None and not _has_stages(node.inner):
            return node
        return node.around(self._cut(node.inner, nest))

    def _nest(self, node: Reduction) -> BlockedNest | None:
        """Decide how the loops of a reduction are cut. None: nothing is cut, as the sum is short or the order of its
        additions is free."""
        rule, frame = node.frame.r.stage.sum_rule, node.frame
        if rule is None:
            return None
        if self.in_order and not frame.r.combines:
            canonical = canonical_sum(self.kernel, frame.r.stage.index)
            assert canonical is not None, "stages with a rule for their sums add floats"
            nest = _canonical_nest(canonical, node)
            return nest if nest.is_cut else None
        iterations, outs = [1] * len(frame.loops), frame.num_outs
        inner: Inner = node.inner
        while not isinstance(inner, Accumulate):
            if isinstance(inner, Loop):
                if inner.axis >= outs:
                    positions = frame.left(inner.axis, frame.number_of(inner.loop))
                    if self.split is not None and is_split(self.split, inner):
                        positions = min(positions, self.split.chunk)
                    iterations[inner.number] = -(-positions // inner.loop.piece.stride)
                inner = inner.body.inner
            elif isinstance(inner, Update):
                inner = inner.inner
            else:
                raise AssertionError(inner)
        unrolled = prod([p.extent for a in range(outs, len(frame.pieces)) for p in frame.pieces[a] if p.role == UNROLL])
        end = node.in_memory[-1] + 1 if node.in_memory else len(frame.loops)
        nest = blocked_nest(rule, iterations, unrolled, end if end < len(frame.loops) else -1)
        return nest if nest.is_cut else None

    def _cut(self, node: Inner, nest: BlockedNest | None) -> Inner:
        """Set the blocks of the loops of a reduction, and of the stages computed inside these loops."""
        if isinstance(node, Accumulate):
            return node if nest is None else node._replace(blocks=nest.positions.sizes)
        if isinstance(node, Update):
            return node._replace(inner=self._cut(node.inner, nest), in_block=nest is not None and nest.adds_to_memory)
        if not isinstance(node, Loop):
            raise AssertionError(node)
        sizes = nest.loops[node.number].sizes if nest is not None and node.axis >= node.frame.num_outs else ()
        tails = tuple([t._replace(body=self._cut_body(t.body, nest)) for t in node.tails])
        done = node.around(self._cut_body(node.body, nest), node.span, tails)
        return done._replace(blocks=sizes) if sizes else done

    def _cut_body(self, body: Body, nest: BlockedNest | None) -> Body:
        return body.holding(self._stages(body), self._cut(body.inner, nest))


def _canonical_nest(canonical: CanonicalSum, node: Reduction) -> BlockedNest:
    """The blocks of a sum at its canonical positions. If the innermost blocks are what the loops inside of an update of memory add, each
    update is a block."""
    frame = node.frame
    sizes = block_sizes(canonical, frame.pieces[frame.num_outs:])
    if sizes is None:
        raise KernelOptError(f"stage {frame.r.stage.name}: blocks of its sum end within an iteration, which `numerics=same` does not allow")
    of_loops = [sizes.get(loop.piece.row, ()) for loop in frame.loops]
    innermost = max([j for j, own in enumerate(of_loops) if own], default=-1)
    end = node.in_memory[-1] + 1 if node.in_memory else 0
    adds_to_memory = 0 <= innermost < end and all(loop.axis < frame.num_outs for loop in frame.loops[innermost + 1:end]) \
        and of_loops[innermost][:1] == (1,)
    if adds_to_memory:
        of_loops[innermost] = of_loops[innermost][1:]
    return BlockedNest(BlockedLoop((), 1), tuple([BlockedLoop(own, 1) for own in of_loops]), adds_to_memory)


def _has_stages(node: Inner) -> bool:
    """Whether any stage is computed inside the loops of a reduction."""
    if isinstance(node, Loop):
        return bool(node.body.stages) or _has_stages(node.body.inner)
    return isinstance(node, Update) and _has_stages(node.inner)
