"""A small rewrite engine: declarative patterns over UOps, applied to a fixpoint.

    RULES = PatternMatcher([
        (Pattern(Ops.DETACH, (Pattern(name="x"),)), lambda x: x),
        (Pattern(Ops.SUB, (Pattern(name="x"), Pattern(name="x"))), lambda x: UOp.const(x.dtype, 0)),
    ])
    simplified = graph_rewrite(graph, RULES)

A pattern without `ops` matches any node. Patterns with the same name must match the same node. The operands of a commutative operation are
tried in both orders. A rule's function gets the named nodes as keyword arguments; it returns the node that replaces the match, or None to
leave the match as it is.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import COMMUTATIVE, Ops, UOp
from svod.errors import ScheduleError

Bindings = dict[str, UOp]
REWRITE_LIMIT = 10_000     # most rewrites of one node: more than that means that two rules undo each other


class Pattern:
    """A pattern for nodes. `ops`: the operations that match, None for any; `src`: one pattern for each source, None for any sources;
    `name`: the name under which the rule's function gets the node."""

    __slots__ = ("name", "ops", "src")

    def __init__(self, ops: Ops | frozenset[Ops] | None = None, src: tuple[Pattern, ...] | None = None, *, name: str | None = None):
        self.ops = frozenset((ops,)) if isinstance(ops, Ops) else ops
        self.src, self.name = src, name

    def matches(self, u: UOp, bound: Bindings) -> Iterator[Bindings]:
        """Yield each way in which u matches, as `bound` extended by the named nodes of this pattern. `bound`: nodes that are named
        already."""
        if self.ops is not None and u.op not in self.ops:
            return
        if self.name is not None:
            known = bound.get(self.name)
            if known is not None and known is not u:
                return
            bound = {**bound, self.name: u}
        if self.src is None:
            yield bound
        elif len(self.src) == len(u.src):
            yield from _all_match(self.src, u.src, bound)
            if u.op in COMMUTATIVE and len(u.src) == 2 and u.src[0] is not u.src[1]:
                yield from _all_match(self.src, u.src[::-1], bound)


def _all_match(patterns: Sequence[Pattern], nodes: Sequence[UOp], bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for bindings in patterns[0].matches(nodes[0], bound):
        yield from _all_match(patterns[1:], nodes[1:], bindings)


Rule = tuple[Pattern, Callable[..., UOp | None]]


class PatternMatcher:
    """An ordered list of rules, indexed by operation."""

    def __init__(self, rules: Sequence[Rule]):
        self.rules = list(rules)
        self.by_op: dict[Ops, list[Rule]] = {}

    def rewrite(self, u: UOp) -> UOp | None:
        """Apply the first rule that changes u; returns the new node, or None if no rule changes it."""
        rules = self.by_op.get(u.op)
        if rules is None:
            rules = self.by_op[u.op] = [(p, f) for p, f in self.rules if p.ops is None or u.op in p.ops]
        for pattern, function in rules:
            for bound in pattern.matches(u, {}):
                result = function(**bound)
                if result is not None and result is not u:
                    return result
        return None


def graph_rewrite(root: UOp, matcher: PatternMatcher) -> UOp:
    """Apply the rules to every node of a graph, sources first, until none applies; returns the new root. A node that replaces another
    inherits its origin. Works without recursion, so deep graphs do not overflow Python's stack.

    Raises ScheduleError if the rules do not terminate."""
    done: dict[UOp, UOp] = {}
    # (node of the original graph, its current replacement, whether the sources of the replacement are finished)
    stack: list[tuple[UOp, UOp, bool]] = [(root, root, False)]
    count: dict[UOp, int] = {}
    while stack:
        original, u, ready = stack.pop()
        if original in done:
            continue
        if not ready:
            stack.append((original, u, True))
            stack.extend((s, s, False) for s in reversed(u.src) if s not in done)
            continue
        src = tuple([done[s] for s in u.src])
        u = u if src == u.src else u.replace(src=src)
        rewritten = matcher.rewrite(u)
        if rewritten is None:
            done[original] = done[u] = u
            if u is not original:
                inherit_origin(u, original)
            continue
        count[original] = count.get(original, 0) + 1
        if count[original] > REWRITE_LIMIT:
            raise ScheduleError(f"rewriting {original!r} does not come to an end: two rules undo each other")
        if rewritten in done:
            done[original] = done[rewritten]
        else:
            stack.append((original, rewritten, False))
    return done[root]
