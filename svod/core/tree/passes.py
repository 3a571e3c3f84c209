"""The passes that make the loop tree of a state, in their order.

A pass takes a tree and gives another one; nodes are immutable. To add one: a file with a function `name(maker, phases)`, whose docstring
has a tree before and after, and its place in `PASSES`. `SVOD_DUMP_AFTER=name` prints the tree after it, the page of a kernel's steps shows
it, and lowering prints what the last one gives."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.core.kernel.scheduler import Scheduler
from svod.core.tree.ahead import ahead
from svod.core.tree.blocks import blocks
from svod.core.tree.build import TreeMaker
from svod.core.tree.launch import launch
from svod.core.tree.nodes import Phase
from svod.core.tree.skips import skips
from svod.core.tree.tails import tails

Tree = tuple[Phase, ...]


class TreePass(NamedTuple):
    """A pass over the loop tree. `what`: what a tree has after it, in words."""

    name: str
    what: str
    run: Callable[[TreeMaker, Tree], Tree]


PASSES = (
    TreePass("launch", "the loops of its launches", launch),
    TreePass("tails", "the tails of its loops: what becomes of positions that whole iterations leave", tails),
    TreePass("blocks", "the blocks that long sums are cut into", blocks),
    TreePass("skips", "the iterations that are skipped, as they add nothing", skips),
    TreePass("ahead", "the copies that run ahead of the iterations that read them", ahead),
)


def loop_tree(state: Scheduler, last: str | None = None) -> Tree:
    """The loop tree of a state, which lowering prints: after the pass called `last`, or all; as placements and orders say for "".

    Raises KernelOptError when the placements of the state contradict each other."""
    maker = TreeMaker(state)
    return apply_passes(maker, maker.phases(), last)


def apply_passes(maker: TreeMaker, tree: Tree, last: str | None = None) -> Tree:
    """A tree after the passes up to the one called `last`, or all."""
    for p in PASSES if last != "" else ():
        tree = p.run(maker, tree)
        if p.name == last:
            break
    return tree
