"""Between: asynchronous copies begin between the products of an iteration.

    Loop r0                                    Loop r0
      body: Wait, Barrier, Fetch 1, Begin   →    body: Wait, Barrier, Fetch 1
      Accumulate, 16 products                    between: Begin 1 of 2 after 5 products, Begin 2 of 2 after 8
                                                 Accumulate, 16 products

If all copies began before the products, they would delay the loads of operands from shared memory. If they began one by one, ptxas 13.0
would put three reads before each. So they begin in `BATCHES` batches during the first half of the products, each batch after products that
load operands. Copies stay where they are if the iteration has a loop, or no products of a subgroup."""
from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

from svod.core.kernel.scheduler import UNROLL, UPCAST
from svod.core.machine.levels import MemorySpace
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Accumulate, Begin, Body, Frame, Loop, Phase, Reduction, Span, Update, with_bodies, with_loops

BATCHES = 2        # batches of copies that begin between products


def between(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Let the copies of all pipelined loops begin between products."""
    if maker.state.pipeline is None or not maker.state.target.has_async_copies:
        return phases
    change = partial(with_loops, partial(_between, maker))
    return tuple([p._replace(launch=with_bodies(change, p.launch)) for p in phases])


def _between(maker: TreeMaker, node: Loop) -> Loop:
    """Let the asynchronous copies of a loop begin between its products, in batches, instead of all before them."""
    found, sums = node.pipeline, straight_sums(node.body)
    if found is None or found.body[-1] != Begin() or not sums:
        return node
    loads = [does_load for one in sums for does_load in _loads(maker, one.frame)]
    if not loads:
        return node
    steps = []
    for number in range(BATCHES):
        limit = (number + 1) * len(loads) // (2 * BATCHES)
        loaded = max([j for j in range(limit + 1) if loads[j]], default=0)
        steps.append((min(loaded, max(0, len(loads) // 2 - 1)) + 1, Begin(number, BATCHES)))
    return node._replace(pipeline=found._replace(body=found.body[:-1], between=tuple(steps)))


def straight_sums(body: Body) -> list[Accumulate] | None:
    """The sums of a body in the order in which they run; None if the body has a loop, or a copy that threads share."""
    if any(c.turns is not None for c in body.stages):
        return None
    found, node = [straight_sums(c.body) for c in body.stages if c.body is not None], body.inner
    node = node.inner if isinstance(node, Reduction) else node
    if isinstance(node, Loop):
        if node.span is not Span.ONCE and (node.axis >= node.frame.num_outs or node.loop.piece.extent > 1):
            return None
        found += [straight_sums(inside) for inside in (node.body, *[t.body for t in node.tails])]
    elif isinstance(node, Update):
        return None
    elif isinstance(node, Accumulate):
        found.append([node])
    return None if None in found else [one for sums in found for one in sums or ()]


# -- products of tiles ------------------------------------------------------------------------------

class Product(NamedTuple):
    """A product of tiles: its offsets along the local axes, and the number of its accumulator."""

    offsets: tuple[int, ...]
    accumulator: int


def products(maker: TreeMaker, frame: Frame) -> list[Product]:
    """The products of one iteration whose operands a subgroup holds in registers, in order. Products beyond the end of an axis are left
    out."""
    plan, found = None if frame.r.combines else maker.layouts.dots.get(frame.r.stage.index), list[Product]()
    if plan is None or not plan.dot.fragments or plan.dot.reads_shared:
        return found
    outs, reds = range(frame.num_outs), range(frame.num_outs, len(frame.pieces))
    tile, parts = frame.positions((UPCAST,), outs), frame.positions((UPCAST,), reds)
    for (_, unrolled), (p, (_, part)), (t, (_, place)) in product(frame.positions((UNROLL,), reds), enumerate(parts), enumerate(tile)):
        offsets = tuple([sum([of.get(a, 0) for of in (unrolled, part, place)]) for a in range(len(frame.pieces))])
        if all(o < bound for o, bound in zip(offsets, frame.bounds, strict=True)):
            found.append(Product(offsets, t * len(parts) + p))
    return found


def _loads(maker: TreeMaker, frame: Frame) -> list[bool]:
    """Per product: whether it is the first to load one of its operands from shared memory."""
    r, seen, found = frame.r, set[tuple[int, ...]](), list[bool]()
    for one in products(maker, frame):
        places = {(o.stage, *[sum([c * one.offsets[a] for a, c in lin.coefs]) for lin in r.nodes[o.node].dims])
                  for o in maker.layouts.dots[r.stage.index].operands if maker.nest.stages[o.stage].space is not MemorySpace.HELD}
        found.append(not places <= seen)
        seen |= places
    return found
