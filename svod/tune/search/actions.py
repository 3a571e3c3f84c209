"""The opts to try next: the default grid, the reference systems' grid, and mutations of a chain.

This file decides which amounts are worth an attempt, not which are legal: an opt that does not apply raises `KernelOptError` in
`apply_opt`, in microseconds, and the proposal is dropped. The default grid is derived per named axis from the target and the extent:

    output axis     UPCAST  small divisors, 1-4 vectors, as     register tiles and lanes
                            many rows of them as registers hold
                    THREAD  the target's cores and their divisors
                    TILE    sizes near powers of two             cache blocks
                    PADTO   the next multiple of one vector
    reduce axis     UNROLL  2, 4, 8, small divisors, whole       straight-line code, same accumulators
                    UPCAST  1-4 vectors, 4                       partial results
                    TILE, THREAD as above
    stages          STAGE at every loop and at the root, INLINE
    order           SWAP of two serial loops of one nest
    output          STREAM where the caches do not keep it
    vectors         LANES of each upcast axis
    groups          LOCAL, GROUP, GROUPTOP, SPLITK               threads and parts, where the target launches groups
                    PIPELINE of loops in which values are
                    staged: 2 or 3 buffers                       copies that run ahead
    dot instructions  TC with each one that the target has and a contraction fits

Loops of several stages may run over one dimension of a tensor: in softmax the maximum, the sum and the output all run over the columns.
Such loops are *tied*: an opt that splits one of them (`SPLITS`) is proposed twice, for that loop alone and with the same amount for all.

The amount 0 stands for the whole extent. The reference grid (`--actions reference`) is that of tinygrad and of Svod in Rust: 193
opts on positions of axes. The axis's name replaces the position when an action is generated.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from svod.core.cost.sketch_facts import outgrows_caches, rows_held
from svod.core.kernel import intrinsics as dots
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import DOT, GROUP, INLINE, LOCAL, LOOP, ROOT, UNROLL, UPCAST, AxisLoop, Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError

WHOLE = 0
MAX_UNROLL = 32
PIPELINE_BUFFERS = (2, 3)    # the numbers of buffers that PIPELINE is tried with, for copies that run ahead of a loop
MAX_PARTS = 64          # most parts that SPLITK divides a reduction into
MAX_WASTE = 1.25        # An amount that increases the work by more than this factor, by rounding up the extent, is not tried.
TILE_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SPLITS = frozenset({"UPCAST", "UNROLL", "TILE"})


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """All divisors of n ≥ 1 in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])


def wasted(extent: int, amount: int) -> float:
    """Work after rounding `extent` up to a multiple of `amount`, over the work before."""
    return -(-extent // amount) * amount / extent


def fitting_amounts(amounts: Iterable[int], extent: int, longest_whole: int) -> tuple[int, ...]:
    """The amounts below `extent` that waste at most MAX_WASTE, in ascending order, and the whole axis if it is no longer than
    `longest_whole`."""
    fitting = sorted(n for n in set(amounts) if 1 < n < extent and wasted(extent, n) <= MAX_WASTE)
    return (*fitting, WHOLE) if 1 < extent <= longest_whole else tuple(fitting)


@lru_cache(maxsize=4096)
def register_amounts(extent: int, lanes: int, registers: int) -> tuple[int, ...]:
    """Amounts of a register tile on an output axis: small ones that fit the extent, one to four vectors, and as many rows of one to four
    vectors as `registers` hold."""
    amounts = {d for d in divisors(extent) if 2 <= d <= 16} | {2, 3, 4, 6, 8, 12} | {lanes * k for k in (1, 2, 3, 4)}
    return fitting_amounts(amounts | {rows_held(v * lanes, lanes, registers) for v in (1, 2, 3, 4)}, extent, 4 * lanes)


@lru_cache(maxsize=4096)
def unroll_amounts(extent: int) -> tuple[int, ...]:
    """Iterations of a reduce axis to unroll: 2, 4, 8, divisors up to 8, and all of a short axis."""
    return fitting_amounts({2, 4, 8} | {d for d in divisors(extent) if 2 <= d <= 8}, extent, MAX_UNROLL)


@lru_cache(maxsize=4096)
def partial_amounts(extent: int, lanes: int) -> tuple[int, ...]:
    """Numbers of partial results to accumulate side by side on a reduce axis: four, or whole vectors."""
    return fitting_amounts({4, *(lanes * k for k in (1, 2, 4, 8))}, extent, 2 * lanes)


@lru_cache(maxsize=4096)
def tile_amounts(extent: int) -> tuple[int, ...]:
    """Sizes of cache blocks: for each of TILE_SIZES the nearest divisor of the extent, or the size itself where none is near."""
    amounts = set()
    for size in TILE_SIZES:
        if size >= extent:
            break
        near = [d for d in divisors(extent) if size / 1.5 < d < size * 1.5 and d < extent]
        amounts.add(min(near, key=lambda d: (abs(d - size), d)) if near else size)
    return tuple(sorted(amounts))


@lru_cache(maxsize=256)
def group_amounts(extent: int, threads: int) -> tuple[int, ...]:
    """Threads of a group along an axis: powers of two, and the whole axis where it fits a group."""
    fitting = [1 << k for k in range(1, 11) if 1 << k < extent and 1 << k <= threads]
    return (*fitting, WHOLE) if 1 < extent <= threads else tuple(fitting)


@lru_cache(maxsize=256)
def thread_amounts(extent: int, threads: int) -> tuple[int, ...]:
    """Numbers of cores to share a loop of `extent` iterations: the divisors of `threads`, the number of all cores."""
    return tuple(n for n in divisors(threads) if 1 < n <= extent)


def lanes_of(kernel: Kernel, target: Target) -> int:
    """Elements in one vector of the widest stored element type, which counts as at least 32 bits wide."""
    widest = max(max(4, s.dtype.itemsize) for s in kernel.stages if s.is_output)
    return max(1, int(target.vector_bytes // widest))


def loop_rows(state: Scheduler) -> list[tuple[AxisLoop, str, int]]:
    """The loops that an opt can change, as (row, kind, stage), in table order. They have more than one iteration, and belong to outputs
    or to reductions that are not inlined into their readers."""
    kernel, loops = state.kernel, []
    for row in state.rows:
        if row.role == LOOP and row.extent > 1:
            axis = kernel.axes[row.axis]
            stage = kernel.stages[axis.stage]
            if (stage.is_output or stage.has_reduce) and state.place[stage.index] != INLINE:
                loops.append((row, axis.kind, stage.index))
    return loops


def default_actions(state: Scheduler, lanes: int) -> Iterator[Opt]:
    """The opts of the default grid for one state."""
    kernel, threads = state.kernel, state.target.threads
    loops = loop_rows(state)
    for row, kind, _ in loops:
        if kind == "o":
            for n in register_amounts(row.extent, lanes, state.target.vector_registers):
                yield Opt("UPCAST", row.name, n)
            if row.extent % lanes and wasted(row.extent, lanes) <= MAX_WASTE:
                yield Opt("PADTO", row.name, lanes)
        else:
            for n in unroll_amounts(row.extent):
                yield Opt("UNROLL", row.name, n)
            for n in partial_amounts(row.extent, lanes):
                yield Opt("UPCAST", row.name, n)
        for n in tile_amounts(row.extent):
            yield Opt("TILE", row.name, n)
        if state.target.has_groups:
            yield from _group_actions(state, row, kind)
        for n in thread_amounts(row.extent, threads):
            yield Opt("THREAD", row.name, n)
    for row in state.rows:
        if row.role == UPCAST and row.extent > 1:
            yield Opt("LANES", row.name)
    for s in kernel.stages:
        if s.has_reduce and not state.dots[s.index]:
            for name, dot in dots.applicable(kernel, state.target, s.index):
                yield Opt("TC", name, dot)
    for i, (a, _, stage) in enumerate(loops):
        for b, _, other in loops[i + 1:]:
            if stage == other:
                yield Opt("SWAP", a.name, b.name)
    yield from _placements(state, loops)


def _placements(state: Scheduler, loops: list[tuple[AxisLoop, str, int]]) -> Iterator[Opt]:
    """Propose for each stage the loops in which it may be computed, and non-temporal stores for outputs that exceed the caches."""
    for s in state.kernel.stages:
        if s.is_output:
            if outgrows_caches(state):
                yield Opt("STREAM", s.name)
            continue
        yield Opt("INLINE", s.name)
        yield Opt("STAGE", s.name, ROOT)
        for row, _, stage in loops:
            if stage != s.index:
                yield Opt("STAGE", s.name, row.name)


def _group_actions(state: Scheduler, row: AxisLoop, kind: str) -> Iterator[Opt]:
    """Opts that distribute a loop over the threads of a group, split it over groups, or prefetch copies for its next iterations."""
    for n in group_amounts(row.extent, state.target.group_threads):
        for op in ("LOCAL",) if kind == "o" else ("GROUP", "GROUPTOP"):
            yield Opt(op, row.name, n)
    if kind == "r":
        for n in group_amounts(row.extent, MAX_PARTS):
            yield Opt("SPLITK", row.name, n)
        if any(isinstance(place, int) and state.rows[place] is row for place in state.place):
            for n in PIPELINE_BUFFERS:
                yield Opt("PIPELINE", row.name, n)


def apply_tied(state: Scheduler, opt: Opt, after: Scheduler) -> Scheduler | None:
    """Apply the split `opt` to all loops that are tied to its own: loops of other stages over the same dimension, with the same extent and
    stride. `after` is `state` with the split of its own loop. Returns None where no loop is tied, or the split applies to none of them."""
    if opt.op not in SPLITS:
        return None
    dimension, loops = state.kernel.dimensions, loop_rows(state)
    row, stage = next((row, stage) for row, _, stage in loops if row.name == opt.axis)
    alike = [other.name for other, _, its in loops
             if its != stage and dimension[other.axis] == dimension[row.axis] and (other.extent, other.stride) == (row.extent, row.stride)]
    tied = after
    for name in alike:
        try:
            tied = apply_opt(tied, opt._replace(axis=name))
        except KernelOptError:
            continue
    return tied if tied is not after else None


# -- the reference grid, amount by amount as the reference systems list it -----------------------------------------------------
REFERENCE_GRID: tuple[tuple[str, int, int], ...] = (
    *(("UPCAST", axis, n) for n in (0, 2, 3, 4, 5, 7) for axis in range(8)),
    *(("UNROLL", axis, n) for n in (0, 4, 7) for axis in range(5)),
    *(("LOCAL", axis, n) for n in (2, 3, 4, 8, 13, 16, 29) for axis in range(6)),
    *(("GROUPTOP", axis, n) for n in (13, 16, 28, 29, 32, 49, 64, 256) for axis in range(3)),
    *(("GROUP", axis, n) for n in (0, 4, 8, 16) for axis in range(3)),
    *(("TC", axis, n) for axis, n in ((0, 0), *((a, 1) for a in range(9)))),
    *(("SWAP", a, b) for a in range(5) for b in range(a + 1, 5)),
    ("LOCAL", 0, 32), ("LOCAL", 6, 2),
    *(("THREAD", axis, n) for n in (2, 3, 4, 5, 8, 12, 16, 24, 32, 64) for axis in range(3)),
)
REFERENCE_PADTO: tuple[tuple[str, int, int], ...] = tuple(("PADTO", axis, 32) for axis in range(7))
_WHOLE_LISTED = frozenset((op, axis) for op, axis, n in REFERENCE_GRID if n == WHOLE and op in ("UPCAST", "UNROLL", "GROUP"))


def reference_actions(state: Scheduler, *, padto: bool = False) -> Iterator[Opt]:
    """The reference systems' 193 actions (200 with `padto`). A position k means the k-th loop with more than one iteration of the output
    stage.

    UNROLL and GROUP* count only its reduce loops; all others count all its loops, output loops first. An explicit amount equal to the
    extent is skipped where the grid also lists the whole axis. A position beyond the last loop gives no action. The tensor-core entries are
    refused by a target without such instructions."""
    axes = state.kernel.axes
    rank = {("o", LOOP): 0, ("o", LOCAL): 1, ("r", GROUP): 1, ("o", UPCAST): 2, ("o", DOT): 2, ("r", LOOP): 3, ("r", UPCAST): 4,
            ("r", UNROLL): 5, ("r", DOT): 5}
    output = state.kernel.output
    live = sorted((r for r in state.rows if r.extent > 1 and axes[r.axis].stage == output), key=lambda r: rank[axes[r.axis].kind, r.role])
    reduces = [r for r in live if axes[r.axis].kind == "r" and r.role == LOOP]
    for op, position, n in (*REFERENCE_GRID, *(REFERENCE_PADTO if padto else ())):
        rows = reduces if op in ("UNROLL", "GROUP", "GROUPTOP") else live
        if position >= len(rows):
            continue
        row = rows[position]
        if op == "SWAP":
            if n < len(rows):
                yield Opt(op, row.name, rows[n].name)
        elif not (n == row.extent and (op, position) in _WHOLE_LISTED):
            yield Opt(op, row.name, n)


# -- mutations ----------------------------------------------------------------------------------------------------------------
def neighbour_amounts(amount: int, extent: int, lanes: int) -> tuple[int, ...]:
    """The amounts to which a mutation may change one: its double, its half, the next divisors of the extent, one vector more or less."""
    n = extent if amount == WHOLE else amount
    below = [d for d in divisors(extent) if 1 < d < n]
    above = [d for d in divisors(extent) if d > n]
    amounts = {2 * n, n // 2, *below[-1:], *above[:1]}
    if n % lanes == 0:
        amounts |= {n + lanes, n - lanes}
    amounts = {WHOLE if m == extent else m for m in amounts if 1 < m <= extent}
    return tuple(sorted(amounts - {amount, WHOLE if n == extent else n}))


def replacements(opt: Opt, state: Scheduler, lanes: int) -> Iterator[Opt]:
    """The opts that may replace `opt`, the next opt of a chain, in `state`: the same with another amount, or STAGE at another loop."""
    if opt.op == "STAGE":
        for row, _, _ in loop_rows(state):
            if row.name != opt.arg:
                yield Opt(opt.op, opt.axis, row.name)
    elif opt.op == "ONLINE":
        axis = state.kernel.stages[state.stage_id(opt.axis)].reds[0]
        for n in neighbour_amounts(opt.arg, state.kernel.axes[axis].extent, lanes):
            if n != WHOLE:
                yield Opt(opt.op, opt.axis, n)
    elif isinstance(opt.arg, int):
        extent = next((r.extent for r in state.rows if r.name == opt.axis), 0)
        if extent > 1:
            for n in neighbour_amounts(opt.arg, extent, lanes):
                yield Opt(opt.op, opt.axis, n)


def _tied_later(state: Scheduler, chain: Sequence[Opt], i: int) -> frozenset[int]:
    """The indices of the opts after opt i of a chain, a split, that repeat it with the same amount for a tied loop. `state`: the state
    that the chain leads to."""
    opt = chain[i]
    if opt.op not in SPLITS:
        return frozenset()
    rows = {r.name: r for r in state.rows}
    dimension, axes = state.kernel.dimensions, state.kernel.axes
    own = rows[opt.axis].axis
    return frozenset(j for j in range(i + 1, len(chain)) if (chain[j].op, chain[j].arg) == (opt.op, opt.arg)
                     and dimension[rows[chain[j].axis].axis] == dimension[own] and axes[rows[chain[j].axis].axis].stage != axes[own].stage)


def mutations(base: Scheduler, chain: Sequence[Opt], lanes: int) -> Iterator[Scheduler]:
    """The states of all chains that differ from `chain` in one opt: it has another amount, puts its stage at another loop, or is left out.
    If tied loops have the same split, these splits are also changed together.

    `base` is the state without opts. A chain whose remainder does not apply after the change is dropped: most changes of an early split
    remove a loop that a later opt names."""
    prefix, whole = base, apply_opts(base, chain)
    for i, opt in enumerate(chain):
        tied = _tied_later(whole, chain, i)
        for changed in (*replacements(opt, prefix, lanes), None):
            for places in ({i}, {i, *tied}) if tied else ({i},):
                state = prefix
                try:
                    for j in range(i, len(chain)):
                        if j not in places:
                            state = apply_opt(state, chain[j])
                        elif changed is not None:
                            state = apply_opt(state, changed._replace(axis=chain[j].axis))
                except KernelOptError:
                    continue
                yield state
        prefix = apply_opt(prefix, opt)
