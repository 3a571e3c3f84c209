"""Footprints compared with counts by hand, the memory traffic computed from them, and the heuristic's choices on two machines."""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from svod.core.cost.caches import PAGE_BYTES, caches_of, footprint, traffic
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import heuristic
from svod.core.cost.work import Access, AccessKind
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.levels import CACHE_LINE_BYTES, MemorySpace
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.compile.native import AVX512
from tests.core.corpus import data, kernel_of
from tests.hand_kernels import gemm, lines

DESKTOP = replace(AVX512, l1=48 << 10, l2=1 << 20, l3=32 << 20, threads=2)
SERVER = replace(AVX512, l1=48 << 10, l2=2 << 20, l3=480 << 20, threads=2)
ALL = float(1 << 40)


def loaded(coefs: tuple[tuple[int, int], ...], limit: int) -> Access:
    """Make a load from an argument of `limit` bytes, whose elements have four bytes."""
    return Access(AccessKind.LOAD, MemorySpace.GLOBAL, 0, coefs, 4, 1, 1.0, 0, limit)


def test_footprints_counted_by_hand() -> None:
    row = footprint(((4, 1024),), 4, ALL, 2048)
    assert (row.lines, row.pages, row.sets1) == (64, 1, 64), "4 KB in a row"
    column = footprint(((4096, 16),), 4, ALL, 2048)
    assert (column.lines, column.pages, column.sets1) == (16, 16, 1), "a column of a matrix with rows of 4 KB shares one set"
    assert footprint(((4096, 16),), 4, ALL, 1024).sets2 == 16 and footprint(((65536, 16),), 4, ALL, 1024).sets2 == 1
    assert footprint(((4160, 16),), 4, ALL, 2048).sets1 == 16, "a line more, and it does not"
    windows = footprint(((4, 3), (4, 14)), 4, ALL, 2048)
    assert windows.lines == 1, "overlapping windows: 16 elements"
    assert footprint(((4, 16), (400, 3), (400, 8)), 4, ALL, 2048).lines == 10, "3 + 8 - 1 rows of one line"
    assert footprint(((4, 1 << 20),), 4, 6400.0, 2048).lines == 100, "no more than there is"


def test_footprints_of_strided_boxes() -> None:
    """Footprints equal counts of cache lines enumerated one by one, for random boxes whose rows do not overlap."""
    rng = random.Random(7)
    for _ in range(60):
        n, rows = rng.randint(1, 60), rng.randint(1, 40)
        pitch = 4 * rng.randint(max(n, 16), 3000)
        steps = tuple(sorted((s, e) for s, e in ((4, n), (pitch, rows)) if e > 1))
        at = np.add.outer(np.arange(rows) * pitch, np.arange(n) * 4)
        exact = len(np.unique(at // CACHE_LINE_BYTES))
        found = footprint(steps, 4, ALL, 2048)
        assert 0.4 * exact <= found.lines <= 1.5 * exact + 1, (steps, exact, found)
        assert found.pages <= len(np.unique(at // PAGE_BYTES)) + 1 and found.sets1 <= 64


def test_columns_of_more_rows_than_a_page_table_has_pages_cost_translations() -> None:
    """Rows of 16 KB, each on pages of its own, are read column by column."""
    caches = caches_of(DESKTOP)

    def translated(rows: int) -> float:
        """Cycles for the translation of one element's address."""
        columns = loaded(((0, 1 << 14), (1, 4)), rows << 14)
        return traffic(caches, [(1, 32), (0, rows)], 0, [1.0, 1.0], [columns], [False]).translated / (32 * rows)

    assert translated(caches.table_pages // 2) == 0
    assert 0 < translated(4 * caches.table_pages) <= caches.table_miss_cycles < translated(4 * caches.walk_pages)


def test_what_fits_costs_nothing_and_what_does_not_is_loaded_again() -> None:
    small = traffic(caches_of(SERVER), [(0, 100), (1, 1000)], 0, [1.0, 1.0], [loaded(((1, 4),), 4000)], [False])
    assert small.cycles == (0.0, 0.0, 0.0, 0.0) and small.moved == 0
    size = 1 << 22      # 16 MB, read 10 times
    big = traffic(caches_of(DESKTOP), [(0, 10), (1, size)], 0, [1.0, 1.0], [loaded(((1, 4),), 4 * size)], [False])
    once = size * 4 / CACHE_LINE_BYTES * caches_of(DESKTOP).levels[1].streamed
    assert 8 * once < big.cycles[1] < 12 * once and big.moved == 0, "from the last-level cache each time"
    lost = caches_of(SERVER).lost
    assert lost(0.5) == 0 and lost(1.0) < lost(2.0) < lost(100.0) < 1


def test_columns_cost_more_than_rows() -> None:
    """Reading columns touches the same lines as reading rows, but the prefetcher does not predict them and they share cache sets."""
    n = 512
    rows = traffic(caches_of(SERVER), [(0, n), (1, n)], 0, [1.0, 1.0], [loaded(((0, 4 * n), (1, 4)), 4 * n * n)], [False])
    columns = traffic(caches_of(SERVER), [(0, n), (1, n)], 0, [1.0, 1.0], [loaded(((1, 4 * n), (0, 4)), 4 * n * n)], [False])
    assert sum(columns.cycles) > 5 * sum(rows.cycles) and columns.cycles[3] > 0


def test_a_larger_cache_is_a_slower_one() -> None:
    for near, far in zip(caches_of(DESKTOP).levels, caches_of(SERVER).levels, strict=True):
        assert near.streamed <= far.streamed and near.unforeseen <= far.unforeseen


@pytest.mark.parametrize("target", [DESKTOP, SERVER], ids=["desktop", "server"])
def test_large_products_pack_what_they_read_in_vectors(target: object) -> None:
    for n in (1024, 2048, 1000):
        chain = heuristic(Scheduler(Kernel(gemm(n, n, n)), target)).applied_opts  # type: ignore[arg-type]
        lane = next(o.axis.removesuffix(".in") for o in chain if o.op == "LANES")
        staged = {o.axis for o in chain if o.op == "STAGE"}
        assert ("s1" if lane == "o1" else "s0") in staged, [str(o) for o in chain]


def test_results_larger_than_the_caches_are_streamed() -> None:
    def streams(n: int, target: object) -> bool:
        return any(o.op == "STREAM" for o in heuristic(Scheduler(Kernel(lines(n)), target)).applied_opts)  # type: ignore[arg-type]
    assert streams(1 << 24, DESKTOP) and streams(1 << 24, SERVER)
    assert not streams(1 << 20, DESKTOP), "4 MB that the last-level cache keeps"
    assert not streams(1 << 20, replace(DESKTOP, l2=1 << 18)), "the next kernel finds them there, if not in the second cache"
    assert not streams(1 << 14, SERVER) and not streams(1 << 14, DESKTOP)


def test_what_is_stored_past_the_caches_leaves_them_to_the_rest() -> None:
    """19 MB read and 19 MB written together do not fit in a cache of 32 MB. If stores bypass it, the 19 MB that are read stay there from
    run to run."""
    n = 75_000 * 64
    state = heuristic(Scheduler(Kernel(lines(n)), DESKTOP))
    assert state.stream and cost_of(state).bytes_moved == 4 * n, "what is stored, and nothing is read from memory"


def test_attention_keeps_the_scores_of_a_few_rows() -> None:
    """The heuristic stages the scores of one register tile of rows at a time, and packs the keys once per head."""
    q, k, v = (Tensor(np.zeros((1, 8, 256, 64), np.float32)) for _ in range(3))
    calls = create_schedule(graph.sink(q.scaled_dot_product_attention(k, v).uop)).calls
    assert len(calls) == 1
    base = Scheduler(Kernel(calls[0].ast), SERVER)
    state = heuristic(base)
    scores = 256 * 256 * 4      # bytes of one head
    assert cost_of(state).scratch_bytes < scores
    assert cost_of(state).cycles < cost_of(base).cycles / 5
    [product] = [s.name for s in base.kernel.stages if s.has_reduce and not s.is_output and len(s.outs) == 3]
    inner = [r.name for r in state.rows if r.role == "upcast" and state.kernel.axes[r.axis].kind == "o" and r.name.startswith(product)]
    assert len(inner) == 2, "the scores are a register tile of their own"


def test_constants_of_large_kernels_leave_the_caches_between_two_runs() -> None:
    """A plan has many kernels like this one: small weights stay in the caches of a core, others come from the next cache or from memory."""
    def memory(n: int, *, constant: bool) -> float:
        weights = data(n, n)
        constants = frozenset({base_of(weights.uop)} if constant else ())
        calls = create_schedule(graph.sink((data(1, n) @ weights).uop), constants).calls
        terms = [dict(part.terms) for part in cost_of(Scheduler(Kernel(calls[-1].ast), replace(SERVER, threads=1))).parts]
        return sum(t["second cache"] + t["memory"] for t in terms)
    assert memory(96, constant=True) == memory(96, constant=False) == 0
    assert memory(512, constant=True) > memory(512, constant=False) == 0
    assert memory(1024, constant=True) > 3.5 * memory(512, constant=True)


def test_columns_of_other_cores_are_dearer_than_rows_of_its_own() -> None:
    """Of the input of a sum, kernels before it have computed rows. A core that sums up columns needs a part of all rows."""
    def crossing(axis: int, chain: str) -> float:
        state = apply_opts(Scheduler(Kernel(kernel_of(data(256, 1024).sum(axis))), replace(SERVER, threads=2)), parse_chain(chain))
        return sum(dict(part.terms)["other cores"] for part in cost_of(state).parts)
    assert crossing(0, "UPCAST(o0, 16)") == crossing(1, "UPCAST(r0, 16) THREAD(o0, 2)") == 0
    assert crossing(0, "UPCAST(o0, 16) THREAD(o0, 2)") > 0
