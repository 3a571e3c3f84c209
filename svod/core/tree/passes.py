"""The passes that make the loop tree of a state, in their order. `SVOD_DUMP_AFTER` prints the tree after each of them."""
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
    """A pass over the loop tree."""

    name: str
    run: Callable[[TreeMaker, Tree], Tree]


PASSES = tuple([TreePass(run.__name__, run) for run in (launch, tails, blocks, skips, ahead)])


def loop_tree(state: Scheduler) -> Tree:
    """The loop tree of a state, that lowering prints. Raises KernelOptError when its placements contradict each other."""
    maker = TreeMaker(state)
    return apply_passes(maker, maker.phases())


def apply_passes(maker: TreeMaker, tree: Tree) -> Tree:
    """A tree after all passes."""
    for p in PASSES:
        tree = p.run(maker, tree)
    return tree
