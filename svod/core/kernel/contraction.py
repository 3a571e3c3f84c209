"""A stage as a contraction: a sum of products of two factors. Intrinsics and sketches ask here."""
from __future__ import annotations

from svod.core.kernel.kernel import Node, ResolvedStage


def product_of(r: ResolvedStage) -> Node | None:
    """The product that a stage sums, seen through conversions; None for a stage that is not one sum of products."""
    if len(r.reductions) != 1 or r.reductions[0].combiner != "ADD":
        return None
    node, = through_casts(r, r.reductions[0].values)
    return r.nodes[node] if r.nodes[node].kind == "alu" and r.nodes[node].op == "MUL" else None


def through_casts(r: ResolvedStage, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes before they were converted to another type."""
    out = []
    for n in nodes:
        while r.nodes[n].kind == "cast":
            n = r.nodes[n].src[0]
        out.append(n)
    return tuple(out)
