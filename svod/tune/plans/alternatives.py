"""The alternatives of a plan: what it may do otherwise than the rules of the cut say (`svod.core.schedule.cut.Deviations`).

    a value between kernels         stored in another order of its axes
    a value read by several         stored once            ↔   computed anew by each reader
    an epilogue of a reduction      in its kernel          ↔   in the kernels that read it
    a sum of two contractions       in one's kernel        ↔   in the other's

Each way is right, and which is faster depends on the kernels on both sides of a buffer. Layers that have the same kernels have one
alternative in common.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from svod.core.graph.shapes import shape_of
from svod.core.ir.uop import ELEMENTWISE, Ops, UOp
from svod.core.ir.variable import is_symbolic
from svod.core.schedule.canonical import key_of_canonical
from svod.core.schedule.cut import BY_RULES, SECOND_CONTRACTION, Cut, Deviations, is_reduction
from svod.core.schedule.schedule import Explained, explain_schedule

_STORED = ELEMENTWISE | {Ops.REDUCE_AXIS, Ops.RESHAPE, Ops.PERMUTE, Ops.GEP}


class Alternative(NamedTuple):
    """One alternative of a plan. `key`: identifies it among those of the plan; `described`: what is done otherwise, in words; `kernels`:
    the keys of the kernels of the plan by the rules that it changes; `is_image`: it stores an image with channels last,
    and no matrix product reads the flattened image."""

    key: str
    described: str
    deviations: Deviations
    kernels: frozenset[str]
    is_image: bool = False


class PlanGraph(NamedTuple):
    """The graph of a plan, as it is scheduled: the SINK of its outputs, and its BUFFERs that are weights."""

    sink: UOp
    constants: frozenset[UOp] = frozenset()

    @property
    def buffers(self) -> list[UOp]:
        """The BUFFERs, in an order that depends on the graph's structure alone."""
        return [u for u in self.sink.toposort() if u.op is Ops.BUFFER]


def together(alternatives: Iterable[Alternative]) -> Deviations:
    """The deviations of several alternatives."""
    chosen = [a.deviations for a in alternatives]
    orders = {u: order for c in chosen for u, order in c.orders.items()}
    return Deviations(frozenset().union(*(c.kept for c in chosen)), frozenset().union(*(c.recomputed for c in chosen)), orders)


def deviations_of(graph: PlanGraph, chosen: frozenset[str]) -> Deviations:
    """What the plan of a graph does otherwise with the alternatives that have these keys; nothing if it does not have all of them."""
    known = alternatives_of(graph) if chosen else {}
    return together(known[key] for key in chosen) if chosen <= known.keys() else BY_RULES


def alternatives_of(graph: PlanGraph) -> dict[str, Alternative]:
    """The alternatives of the plan of a graph, by their keys. Raises ScheduleError."""
    found: dict[str, Alternative] = {}
    for a in _Finder(explain_schedule(graph.sink, graph.constants)).all():
        known = found.get(a.key)
        found[a.key] = a if known is None else known._replace(deviations=together([known, a]), kernels=known.kernels | a.kernels)
    return found


class _Finder:
    """Finds the alternatives of a plan that is made by the rules."""

    def __init__(self, explained: Explained) -> None:
        self.cut: Cut = explained.cut
        self.why = self.cut.why
        self.fixed = explained.graph.roots
        self.movable = explained.movable
        self.call = {root: i for i, root in enumerate(explained.roots) if root is not None}
        self.keys = [key_of_canonical(call.ast) for call in explained.schedule.calls]
        self.names = [call.name_hint for call in explained.schedule.calls]
        self.makers = {u: self.kernels_of(u) for u in self.cut.order if u not in self.why and self.cut.uses.get(u)}
        self.rank_of = self.find_windows()
        self.images = self.find_images()

    def kernels_of(self, u: UOp) -> frozenset[UOp]:
        """The nodes stored by the kernels that read u, or that compute u if it has no buffer."""
        return frozenset(use.kernel for use in self.cut.uses.get(u, ()))

    def alternative(self, kind: str, u: UOp, kernels: Iterable[UOp], deviations: Deviations, *, is_image: bool = False) -> Alternative:
        calls = [self.call[k] for k in kernels if k in self.call]
        shape = "×".join(map(str, shape_of(u)))
        h = hashlib.blake2b(digest_size=8)
        for part in (kind, u.dtype.name, shape, *sorted(self.keys[i] for i in calls)):
            h.update(part.encode() + b"\n")
        names = ", ".join(sorted({self.names[i] for i in calls}))
        changed = frozenset(self.keys[i] for i in calls)
        return Alternative(h.hexdigest(), f"{u.dtype.name} {shape} {kind} ({names})", deviations, changed, is_image)

    def all(self) -> Iterator[Alternative]:
        for u in self.cut.order:
            if u in self.why:
                yield from self.of_realised(u)
            elif u in self.makers:
                yield from self.of_recomputed(u)

    def of_realised(self, u: UOp) -> Iterator[Alternative]:
        """The alternatives of a value that has a buffer."""
        around = self.kernels_of(u) | {u}
        order = self.other_order(u)
        if order is not None:
            moved = [a for a, b in enumerate(order) if a != b]
            kind = "stored with channels last" if u in self.images else f"stored with axes {moved[0]} and {moved[1]} exchanged"
            yield self.alternative(kind, u, around, Deviations(orders={u: order}), is_image=u in self.images and not self.is_flattened(u))
        if u in self.fixed:
            return
        if u in self.cut.recomputable and not self.cut.holds_reduction(u):
            yield self.alternative("computed anew by each reader", u, around, Deviations(recomputed=frozenset([u])))
        inner = [r for r, kernels in self.makers.items() if kernels == {u} and is_reduction(r)]
        if inner and u.op in ELEMENTWISE:
            before = max(inner, key=self.cut.position.__getitem__)
            yield self.alternative("with the epilogue of its reduction in its readers", u, around, Deviations(kept=frozenset([before])))
        claimed = self.cut.contraction_of.get(u)
        if claimed is not None and any(why == SECOND_CONTRACTION and self.kernels_of(s) == {u} for s, why in self.why.items()):
            kept = frozenset([self.cut.lift(claimed)])
            yield self.alternative("summed in the kernel of its other contraction", u, around, Deviations(kept=kept))

    def of_recomputed(self, u: UOp) -> Iterator[Alternative]:
        """The alternative of a value that several kernels compute, if it is the last one that all of them do."""
        makers = self.makers[u]
        if len(makers) > 1 and u.op in ELEMENTWISE and u.op is not Ops.CAST and not any(
                self.makers.get(c) == makers and c.op in ELEMENTWISE for c in self.cut.consumers.get(u, ())) and self.reads_memory(u):
            yield self.alternative("stored once for all readers", u, makers, Deviations(kept=frozenset([u])))

    def reads_memory(self, u: UOp) -> bool:
        return any(n.op is Ops.BUFFER or n in self.why for n in self.cut.cone(u, self.why))

    def other_order(self, u: UOp) -> tuple[int, ...] | None:
        """The other order of axes in which a realised value may be stored: images with channels last, operands and results of contractions
        with their last two axes exchanged; None for others."""
        shape = shape_of(u)
        wide = [a for a, n in enumerate(shape) if n != 1]
        if u not in self.movable or u.op not in _STORED or len(wide) < 2 or is_symbolic(shape):
            return None
        if u in self.images:
            return (0, *range(2, len(shape)), 1)
        if not any(k in self.cut.contraction_of for k in self.kernels_of(u) | {u}):
            return None
        order = list(range(len(shape)))
        order[wide[-2]], order[wide[-1]] = wide[-1], wide[-2]
        return tuple(order)

    def find_windows(self) -> dict[UOp, int]:
        """Kernel → the rank of the image whose windows over all axes after (N, C) it reads."""
        rank_of: dict[UOp, int] = {}
        for u in self.cut.order:
            if u.op is Ops.WINDOW and [axis for axis, *_ in u.arg] == list(range(2, len(shape_of(u.src[0])))):
                rank_of.update(dict.fromkeys(self.kernels_of(u) if u not in self.why else {u}, len(shape_of(u.src[0]))))
        return rank_of

    def is_flattened(self, u: UOp) -> bool:
        """Whether a contraction reads an image whose result is none, such as a matrix product of flattened images: it would read channels
        that are last with large steps."""
        return any(k in self.cut.contraction_of and k not in self.images and not self.reads_windows(k, u) for k in self.kernels_of(u))

    def reads_windows(self, kernel: UOp, u: UOp) -> bool:
        """Whether a kernel reads or makes windows of images of the shape of u, which may have axes of extent 1 at its end."""
        rank, shape = self.rank_of.get(kernel), shape_of(u)
        return rank is not None and len(shape) >= rank and all(n == 1 for n in shape[rank:])

    def find_images(self) -> frozenset[UOp]:
        """The realised values of shape (N, C, …) that windows over all axes after C read or make, and values of that rank that kernels
        compute from them or that they are computed from."""
        candidates = [u for u in self.why if u in self.movable and is_image_shape(shape_of(u))]
        readers = {u: self.kernels_of(u) for u in candidates}
        found = {u for u in candidates if any(self.reads_windows(k, u) for k in (u, *readers[u]))}
        while True:
            more = {u for u in candidates if u not in found and any(
                len(shape_of(v)) == len(shape_of(u)) and (v in readers[u] or u in readers[v]) for v in found)}
            if not more:
                return frozenset(found)
            found |= more


def is_image_shape(shape: Sequence[int]) -> bool:
    """Whether a shape is (N, C, …) with several channels and positions."""
    return len(shape) > 2 and shape[1] != 1 and any(n != 1 for n in shape[2:]) and not is_symbolic(shape)

