"""Ahead: copies into shared memory start several iterations before the one that reads them (PIPELINE).

    Loop r0                             Loop r0, s0 and s1 ahead
      Compute s0                          prologue: Fetch 0
      Compute s1                  →       body: Wait, Barrier, Fetch 1, Begin
      Reduction …                         Reduction …
                                          epilogue: Wait

Such a copy has several buffers: while an iteration reads one of them, copies for later iterations fill the others. There is one barrier per
iteration: after it the data of this iteration is in place, and no thread reads the buffer that is filled next. Copies for iterations past
the last one repeat its data, which is never read. Asynchronous copies begin after the addresses of an iteration's reads are known. Copies
whose threads loop over turns, and guarded copies, begin at once: until they begin, their conditions would occupy registers.

Instructions that read both operands from shared memory run asynchronously. With four buffers or more, the products of one iteration are
waited for only after the next iteration has issued its own, and copies start one iteration later.

If the target has bulk copies, each copy moves a whole row, provided that all rows of the stage are long enough, lie inside an argument, and
begin at multiples of 16 bytes on both sides. Shared memory then has a counter per buffer for the rows that have arrived. Threads wait once
the counters are set up, and before these are released."""
from __future__ import annotations

from functools import partial

from svod.core.kernel.group_memory.copy import ASYNC_BYTES, BULK_BYTES
from svod.core.kernel.intrinsics import stored_node
from svod.core.kernel.kernel import Node
from svod.core.kernel.layout import is_exact
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import (
    AheadCopy,
    Barrier,
    Begin,
    Compute,
    Counters,
    Ends,
    Fetch,
    Loop,
    Phase,
    Pipeline,
    Span,
    Step,
    Wait,
    with_bodies,
    with_loops,
)

# least number of buffers with which products may finish after the next barrier; with three, copies would then start only one iteration
# ahead
LATE_BUFFERS = 4


def ahead(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Let the copies in all pipelined loops run ahead; phases come back unchanged if the state has no PIPELINE."""
    if maker.state.pipeline is None:
        return phases
    change = partial(with_loops, partial(_ahead, maker))
    return tuple([p._replace(launch=with_bodies(change, p.launch)) for p in phases])


def _ahead(maker: TreeMaker, node: Loop) -> Loop:
    """Move the copies of a loop's body that have several buffers to the loop's `pipeline`. A loop of a single iteration stays as it is."""
    chosen, found = maker.state.pipeline, tuple([c for c in node.body.stages if c.nest.buffers > 1])
    if chosen is None or not found or node.axis < node.frame.num_outs or node.span is not Span.ALL or node.whole <= 1:
        return node
    copies, late = tuple([_copy(maker, node, c) for c in found]), _products_under_way(maker, node, chosen.buffers)
    further = chosen.buffers - 1 - late
    begins = any(c.turns.is_loop or (c.is_async and c.is_guarded) for c in copies)
    first: tuple[Step, ...] = tuple([Fetch(k, True) for k in range(further)])
    steps: tuple[Step, ...] = (Wait(further - 1), Barrier(), Fetch(further, begins))
    last: tuple[Step, ...] = (Wait(0),)
    if any(copy.is_bulk for copy in copies):
        first, last = (Counters(), Barrier(), *first), (*last, Barrier(), Counters(ends=True))
    pipeline = Pipeline(copies, further, late, first, steps if begins else (*steps, Begin()), last)
    return node._replace(body=node.body._replace(stages=tuple([c for c in node.body.stages if c not in found])), pipeline=pipeline)


def _products_under_way(maker: TreeMaker, loop: Loop, buffers: int) -> int:
    """How many earlier iterations of a pipelined loop may still have products running when an iteration begins: 1 if an instruction reads
    both operands from the buffers asynchronously and there are `LATE_BUFFERS` buffers or more, else 0."""
    plan = maker.layouts.dots.get(loop.frame.r.stage.index)
    if buffers < LATE_BUFFERS or plan is None or not plan.dot.reads_shared:
        return 0
    return int(all(maker.nest.stages[o.stage].buffers > 1 for o in plan.operands))


def _copy(maker: TreeMaker, loop: Loop, node: Compute) -> AheadCopy:
    """How the threads of a group copy a stage for a later iteration."""
    r, copy, layout, target, unsafe = node.nest.r, node.nest.copy, node.layout, maker.state.target, maker.checks.unsafe
    assert copy is not None and layout is not None and node.body is not None
    stored, width = r.nodes[stored_node(r, maker.layouts.packed.get(node.stage))], node.body.frame.width
    is_bulk = node.nest.bulk_rows > 0 and all(a not in unsafe for a in r.axes) and all(
        n * stored.dtype.itemsize % BULK_BYTES == 0 for n in _moved_back(maker, loop, node.nest.written[copy.vector].start[0]))
    is_plain = stored.gate < 0 or (r.nodes[stored.alt].kind == "const" and r.nodes[stored.alt].arg == 0)
    is_async = target.has_async_copies and _is_in_memory(maker, stored) and is_plain and not is_bulk \
        and width * stored.dtype.itemsize in ASYNC_BYTES and (width == 1 or layout.strides[copy.vector] == 1)
    found = AheadCopy(maker.in_turns(node, True) if is_bulk else node, is_bulk, is_async, False)
    return found._replace(is_guarded=found.turns.rest > 0 or stored.gate >= 0 or any(r.axes[a] in unsafe for a in stored.deps))


def _is_in_memory(maker: TreeMaker, n: Node) -> bool:
    """Whether a node is loaded from an argument, or reads a value of another phase as it is stored."""
    return n.kind == "load" or (n.kind == "read" and maker.placement.paths[n.arg] == () and n.arg not in maker.layouts.packed)


def _moved_back(maker: TreeMaker, loop: Loop, terms: dict[int, int]) -> list[int]:
    """Starts of a region, in positions, that are no multiples of the loops' steps because last tiles are moved back; 1 stands for any
    start. `terms`: loop row of the state → positions that one iteration moves the region. The list is empty if no tile is moved back."""
    state, found = maker.state, list[int]()
    for row, c in terms.items():
        q = state.stage_of_row(row)
        reader = maker.nest.stages[q]
        a = reader.r.axes.index(state.rows[row].axis)
        if q == loop.frame.r.stage.index:
            if loop.frame.ends(a) is Ends.MOVED_BACK:
                stride = next(p.stride for p in reader.axes[a] if p.row == row)
                found.append(c // stride * (loop.frame.bounds[a] - loop.frame.reach(a)))
        elif a < len(reader.region) and not is_exact(reader.axes[a], reader.region[a]):
            found.append(1)
    return found
