"""The passes over the loop tree of a state, in the order in which they run.

A pass takes a tree and returns a new one; nodes are immutable. To add a pass, write a file with a function `name(maker, phases)` and a
docstring that shows a tree before and after, and enter it in `PASSES`. `SVOD_DUMP_AFTER=name` prints the tree after it, the page of a
kernel's steps shows it, and lowering emits the tree after the last pass."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.core.kernel.scheduler import Derived, Scheduler
from svod.core.tree.ahead import ahead
from svod.core.tree.barriers import barriers
from svod.core.tree.between import between
from svod.core.tree.blocks import blocks
from svod.core.tree.build import TreeMaker
from svod.core.tree.early import early
from svod.core.tree.launch import launch
from svod.core.tree.nodes import Phase
from svod.core.tree.prefetches import prefetches
from svod.core.tree.skips import skips
from svod.core.tree.tails import tails

Tree = tuple[Phase, ...]


class TreePass(NamedTuple):
    """A pass over the loop tree. `what`: a phrase that says what the pass adds to the tree."""

    name: str
    what: str
    run: Callable[[TreeMaker, Tree], Tree]


PASSES = (
    TreePass("launch", "the loops of its launches", launch),
    TreePass("tails", "the tails of its loops: what becomes of positions that whole iterations leave", tails),
    TreePass("blocks", "the blocks that long sums are cut into", blocks),
    TreePass("skips", "the iterations that are skipped, as they add nothing", skips),
    TreePass("ahead", "the copies that run ahead of the iterations that read them", ahead),
    TreePass("between", "the copies that begin between products", between),
    TreePass("early", "the operands that are loaded before the last products of the iteration before", early),
    TreePass("prefetches", "the loads that ask for what a later iteration reads", prefetches),
    TreePass("barriers", "the barriers between accesses of threads to shared memory", barriers),
)


def loop_tree(state: Scheduler, last: str | None = None) -> Tree:
    """The loop tree of a state, which is priced, and from which code is emitted. `last`: the name of the last pass to run, "" for none;
    None runs all of them and keeps the tree with the state.

    Raises KernelOptError if the placements of the state contradict each other, ValueError if no pass is called `last`."""
    return _whole_tree(state) if last is None else made_tree(TreeMaker(state), last)


@Derived
def _whole_tree(state: Scheduler) -> Tree:
    return made_tree(TreeMaker(state))


UNCOUNTED = frozenset({"tails", "prefetches"})     # passes that change no count of whole iterations


def counted_tree(maker: TreeMaker, phases: Tree | None = None) -> Tree:
    """The tree of which `svod.core.cost.runs` counts the iterations on a CPU, without tails and prefetches. `phases`: as in
    `made_tree`."""
    tree = maker.phases() if phases is None else phases
    for p in PASSES:
        if p.name not in UNCOUNTED:
            tree = p.run(maker, tree)
    return tree


def made_tree(maker: TreeMaker, last: str | None = None, phases: Tree | None = None) -> Tree:
    """Run the passes up to `last`, or all, over `phases`; None: over the state's tree before any pass."""
    names = ["", *[p.name for p in PASSES]]
    if last is not None and last not in names:
        raise ValueError(f"no pass is called {last!r}: there are {', '.join(names[1:])}")
    tree = maker.phases() if phases is None else phases
    for p in PASSES[:None if last is None else names.index(last)]:
        tree = p.run(maker, tree)
    return tree
