"""The work of a stage counted by hand: as a core does it and as a thread does."""
from __future__ import annotations

from svod.core.cost import cpu
from svod.core.cost.work import AccessKind, StageWork
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.levels import MemorySpace
from tests.compile.native import AVX512
from tests.hand_kernels import gemm


def work_of(kernel: Kernel, *opts: tuple[str, str, int]) -> StageWork:
    return cpu.work_of(apply_opts(Scheduler(kernel, AVX512), [Opt(*o) for o in opts]))[0]


def test_the_docstring() -> None:
    work = work_of(Kernel(gemm(64, 64, 64)), ("UPCAST", "o0", 4), ("UPCAST", "o1", 16))
    assert work.body == 16 * 4 * 64 and work.runs_of_loop[:3] == [1, 16, 64]
    assert work.positions == [4, 1, 1] and work.accumulators == work.tile == 4 and work.rows == 4
    (_, a), (_, b) = [(i, n) for i, n, is_load in work.values() if is_load]
    assert {work.runs(n.deps) for n in (a, b)} == {4 * work.body, work.body}
    product = work.r.reductions[0].values[0]
    assert work.r.nodes[product].op == "MUL" and product not in [i for i, _, _ in work.values()], "it is part of the multiply-adds"
    store = work.store(4, work.place, 4.0)
    assert (store.kind, store.space, store.depth) == (AccessKind.STORE, MemorySpace.GLOBAL, 2), "outside of the sum"
    assert store.coefs == ((0, 256), (1, 4)) and store.limit == 64 * 64 * 4


def test_neighbouring_windows_overlap() -> None:
    """Eight windows of three taps read ten elements with a stride of one, 17 with a stride of two, and 24 with a stride of four."""
    for stride, read in ((1, 10), (2, 17), (4, 24)):
        work = work_of(Kernel(gemm(64, 64, 64)))
        work.positions[:3], work.lanes = [8, 3, 1], 1
        assert round(24 * work.distinct((0, 1), ((0, stride), (1, 1)))) == read
