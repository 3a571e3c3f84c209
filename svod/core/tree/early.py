"""Early: the first operands of the next iteration are loaded before the last products of this one.

    Loop r0                              Loop r0
      prologue: Fetch 0                    prologue: Fetch 0, Wait, Barrier, Load of products 0…4
      body: Wait, Barrier, Fetch 1   →     body: Fetch 1
      Accumulate, 16 products              between: after 12: Load of products 12…16, Wait, Barrier, Load of products 0…4 of 1 further
                                           Accumulate, 16 products

During the barrier and the loads behind it no thread would multiply, so some products are left for that time. Before the barrier, copies
are committed, and the iteration has read all that it reads of shared memory. The loop carries the operands. The last iteration loads some
that are never used, from a buffer that an earlier copy has filled. An operand that the loop does not copy may end with its last iteration,
so a loop with such an operand loads nothing early."""
from __future__ import annotations

from functools import partial
from itertools import filterfalse

from svod.core.tree.between import products, straight_sums
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Accumulate, AheadCopy, Barrier, Body, Load, Loop, Phase, Step, Wait, with_bodies, with_loops


def early(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Let all pipelined loops of products load operands early."""
    if maker.state.pipeline is None:
        return phases
    change = partial(with_loops, partial(_early, maker))
    return tuple([p._replace(launch=with_bodies(change, p.launch)) for p in phases])


def _early(maker: TreeMaker, node: Loop) -> Loop:
    """Let a loop load operands early if it does nothing but copy and multiply, with several products for each accumulator."""
    found, sums = node.pipeline, straight_sums(node.body)
    if found is None or not sums or not _is_sum_alone(node.body) or not all(_is_address_alone(copy) for copy in found.copies):
        return node
    frame, copied = sums[0].frame, {copy.compute.stage for copy in found.copies}
    made = products(maker, frame)
    count, own, given = len(made), len({p.accumulator for p in made}), [p.accumulator for p in made]
    if not made or count < 2 * own or given != given[:own] * (count // own) \
            or any(o.stage not in copied for o in maker.layouts.dots[frame.r.stage.index].operands):
        return node
    waits, places = tuple(filter(_is_wait, found.body)), tuple([p.offsets for p in made])
    steps = [(count - own, step) for step in (Load(0, places[-own:]), *waits, Load(1, places[:own]))]
    return node._replace(pipeline=found._replace(prologue=(*found.prologue, *waits, Load(0, places[:own])),
                                                 body=tuple(filterfalse(_is_wait, found.body)),
                                                 between=(*found.between, *steps)))


def _is_wait(step: Step) -> bool:
    """Whether threads wait for data, or for each other."""
    return isinstance(step, (Wait, Barrier))


def _is_sum_alone(body: Body) -> bool:
    """Whether a body without a loop has nothing but one sum."""
    inner = body.inner
    if isinstance(inner, Loop):
        return not body.stages and not inner.tails and not inner.blocks and _is_sum_alone(inner.body)
    return not body.stages and isinstance(inner, Accumulate) and not inner.blocks


def _is_address_alone(copy: AheadCopy) -> bool:
    """Whether the addresses are all that threads compute for an asynchronous copy, and none of them depends on a loaded number."""
    loads = [n for n in copy.compute.nest.r.nodes if n.kind in ("load", "read")]
    return copy.is_async and len(loads) == 1 and not copy.turns.is_loop
