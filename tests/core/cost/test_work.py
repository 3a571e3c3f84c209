"""The work of a stage counted by hand: as a core does it and as a thread does."""
from __future__ import annotations

from dataclasses import replace

import pytest

from svod.core.cost.cpu import core_work
from svod.core.cost.work import AccessKind, StageWork, block_ends
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler, cut_of
from svod.core.machine.levels import MemorySpace
from svod.core.tree.nodes import Inner, Loop, Phase, Reduction
from svod.core.tree.passes import loop_tree
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import data, kernel_of
from tests.hand_kernels import gemm


def work_of(kernel: Kernel, *opts: tuple[str, str, int]) -> StageWork:
    state = apply_opts(Scheduler(kernel, AVX512), [Opt(*o) for o in opts])
    return core_work(state, loop_nest(state), kernel.output)


def test_the_docstring() -> None:
    work = work_of(Kernel(gemm(64, 64, 64)), ("UPCAST", "o0", 4), ("UPCAST", "o1", 16))
    assert work.body == 16 * 4 * 64 and work.runs_of_loop[:3] == [1, 16, 64]
    assert work.positions == [4, 1, 1] and work.accumulators == work.tile == 4 and work.rows == 4
    (_, a), (_, b) = [(i, n) for i, n, is_load in work.values() if is_load]
    assert {work.runs(n.deps) for n in (a, b)} == {4 * work.body, work.body}
    product = work.r.reductions[0].values[0]
    assert product in work.skipped and product not in [i for i, _, _ in work.values()], "the product is part of the multiply-adds"
    store = work.store(4, work.place, 4.0)
    assert (store.kind, store.space, store.depth) == (AccessKind.STORE, MemorySpace.GLOBAL, 2), "outside of the sum"
    assert store.coefs == ((0, 256), (1, 4)) and store.limit == 64 * 64 * 4


def test_neighbouring_windows_overlap() -> None:
    """Eight windows of three taps read ten elements with a stride of one, 17 with a stride of two, and 24 with a stride of four."""
    for stride, read in ((1, 10), (2, 17), (4, 24)):
        work = work_of(Kernel(gemm(64, 64, 64)))
        work.positions[:3], work.lanes = [8, 3, 1], 1
        assert round(24 * work.distinct((0, 1), ((0, stride), (1, 1)))) == read


def ends_in_tree(phase: Phase) -> int:
    """Blocks of additions that end in a phase whose launch runs one part of a sum, all parts together."""
    parts, runs, ends = phase.split.parts if phase.split else 1, 1, 0
    node: Inner = phase.launch.body.inner
    assert isinstance(node, Reduction)
    node = node.inner
    while isinstance(node, Loop):
        iterations = min(node.whole, phase.split.chunk // node.stride) if phase.split else node.whole
        ends += runs * sum(-(-iterations // size) for size in node.blocks)
        runs, node = runs * iterations, node.body.inner
    return parts * ends


@pytest.mark.parametrize("chain", ["", "UPCAST(r0, 16)", "THREAD(r0, 2)", "THREAD(r0, 16)", "UPCAST(r0, 16) THREAD(r0, 16)",
                                   "UPCAST(r0, 8) THREAD(r0, 4)"])
@pytest.mark.parametrize("extent", [256, 1024, 4096, 1 << 16])
def test_the_blocks_that_are_priced_are_those_of_the_tree(extent: int, chain: str) -> None:
    """Parts of a sum are sums of their own: one of 64 additions has no blocks."""
    state = apply_opts(Scheduler(Kernel(kernel_of(data(extent).sum())), replace(AVX2, threads=16)), parse_chain(chain))
    output = state.kernel.output
    stage = loop_nest(state).stages[output]
    priced = block_ends(stage.r, [(a, loop.extent) for a, loop in stage.loops], stage.axes, cut_of(state, output))
    assert priced == ends_in_tree(loop_tree(state)[0])
