"""Dot and matrix instructions, which sum products of narrow numbers: the contractions that they compute, and the form of their operands.

    acc[lane]   += Σ over i < group of a[lane·group + i] · b[lane·group + i]                                         vectors
    acc[m, n]   += Σ over k < depth, i < group of a[m, k·group + i] · b[k, n·group + i]                               tiles

A group is one 32-bit word of 4 bytes or 2 halves. Operands are staged in their narrow type with the group innermost, padded with zeros to
whole instructions; the copy does masks and conversions. A vector instruction reads one operand as a vector of words, the other as a word in
all lanes. A tile instruction reads one operand in rows along the sum, the other in rows of groups side by side.

If the threads of a subgroup hold tiles together, a group is one number. Either dim of an operand may then be innermost, both are padded
with zeros to whole tiles, and LOCAL counts subgroups. A stage with such tiles that is computed inside another stage lies in shared memory.
An instruction of several subgroups reads its operands from shared memory, in lines of 16 bytes."""
from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.contraction import product_of
from svod.core.kernel.kernel import Kernel, LinearIndex, Node, ResolvedStage, Stage
from svod.core.kernel.numerics import canonical_sum
from svod.core.kernel.scheduler import UPCAST, Scheduler, cut_of
from svod.core.machine.isa import DOTS, MATRIX_LINE_BYTES, TILE_REGISTERS, Digit, Dot, Fragment
from svod.core.machine.target import SAME, Target
from svod.errors import KernelOptError

LEAST_POWER = -126.0     # exponent of the smallest normal power of two in float32
WORD = dtypes.uint32     # dtype of a group: 32 bits of an operand, which a vector instruction sums into one result


class Operand(NamedTuple):
    """A factor of a contraction. `node`: the read in the contraction; `dim`: the dim that is summed over; `source`: its narrow dtype;
    `axes`: the local axes that it depends on."""

    node: int
    stage: int
    dim: int
    source: DType
    axes: tuple[int, ...]


def operands_of(kernel: Kernel, r: ResolvedStage, axis: int) -> tuple[Operand, Operand]:
    """The two factors of the sum of products in `r`; reduce axis `axis` moves one dim of each, position by position.

    Raises KernelOptError with the reason if the stage is no such sum, or a factor cannot be copied for an instruction."""
    product = product_of(r)
    if product is None or product is not r.nodes[r.reductions[0].values[0]] or any(r.nodes[n].kind != "read" for n in product.src):
        raise KernelOptError(f"stage {r.stage.name} does not sum up products of two stages")
    local = r.axes.index(axis)
    operands = []
    for n in product.src:
        node = r.nodes[n]
        dims = [i for i, lin in enumerate(node.dims) if lin.coef(local) or any(local in r.nodes[a].deps for a, _ in lin.atoms)]
        name = kernel.stages[node.arg].name
        if len(dims) != 1 or (lin := node.dims[dims[0]]).coefs != ((local, 1),) or lin.const or lin.atoms:
            raise KernelOptError(f"{name} is not read along {kernel.axes[axis].name} alone, position by position")
        source = source_of(kernel.stages[node.arg])
        if source is None:
            raise KernelOptError(f"{name} is the result of a reduction, or of the kernel: it is not copied for an instruction")
        operands.append(Operand(n, node.arg, dims[0], source, node.deps))
    first, second = operands
    if first.stage == second.stage:
        raise KernelOptError(f"both factors are read from {kernel.stages[first.stage].name}, which is laid out for one of them")
    return first, second


def holds_tiles_of(target: Target, dtype: DType) -> bool:
    """Whether the subgroups or the cores of a target multiply tiles of numbers of this dtype."""
    if target.numerics == SAME and dtype.is_float:
        return False
    return target.uses_intrinsics and any(d.is_tile and dtype in d.sources and d.runs_on(target)
                                          and (not d.significand or target.rounds_factors) for d in DOTS.values())


def source_of(stage: Stage) -> DType | None:
    """The dtype of a stage's value; if the value is a conversion, the dtype before it. None for a stage that is not a copy."""
    value = stage.value
    if stage.is_output or stage.has_reduce:
        return None
    return value.src[0].dtype if value.op.value == "CAST" else value.dtype


def check(kernel: Kernel, target: Target, stage: int, axis: int, dot: Dot, tile: tuple[int, int] = (-1, -1)) -> tuple[Operand, Operand]:
    """The operands of `dot` in the contraction in `stage`; `tile`: the axes of the rows and columns of its tiles, for an instruction with
    tiles. Raises KernelOptError with the reason if `dot` does not compute the contraction."""
    if target.numerics == SAME and canonical_sum(kernel, stage) is not None:
        raise KernelOptError("`numerics=same` keeps instructions that add several products of floats out of every kernel")
    if not target.uses_intrinsics:
        raise KernelOptError("TC=0 keeps dot and matrix instructions out of every kernel")
    if dot.significand and not target.rounds_factors:
        raise KernelOptError(f"{dot.name} rounds factors to {dot.significand} significant bits, which TF32=1 allows where the target can")
    if not dot.runs_on(target):
        raise KernelOptError(f"the target has no {' and '.join(dot.features)} on {dot.arch}; its features are {', '.join(target.features)}")
    for a in (axis, *tile):
        if a >= 0 and kernel.axes[a].bound is not None:
            raise KernelOptError(f"how many positions {kernel.axes[a].name} has depends on a variable; an instruction takes whole groups "
                                 "and tiles")
    r = kernel.resolve(frozenset())[stage]
    assert r is not None
    operands = operands_of(kernel, r, axis)
    for o in operands:
        if o.source == kernel.stages[o.stage].dtype and o.source not in dot.sources:
            raise KernelOptError(f"{kernel.stages[o.stage].name} is no value of a narrower type that was made wide")
    total = r.reductions[0].dtypes[0]
    if total != dot.accumulator or any(o.source not in dot.sources for o in operands):
        raise KernelOptError(f"{dot.name} sums up {', '.join(d.name for d in dot.sources)} in {dot.accumulator.name}; the stage "
                             f"{' by '.join(o.source.name for o in operands)} in {total.name}")
    for o in operands:
        if sum(o.stage in reads for reads in kernel.reads) != 1:
            raise KernelOptError(f"{kernel.stages[o.stage].name} is read by other stages too")
    return _by_rows(kernel, r, operands, dot, tile) if dot.is_tile else operands


def _by_rows(kernel: Kernel, r: ResolvedStage, operands: tuple[Operand, Operand], dot: Dot,
             tile: tuple[int, int]) -> tuple[Operand, Operand]:
    """Order the operands of a tile instruction: first the one that has the rows, then the one that has the columns."""
    rows, columns = (r.axes.index(a) for a in tile)
    if kernel.written:
        raise KernelOptError("a kernel that reads what it writes computes no position twice, as whole tiles may")
    first, second = operands
    by_row, by_column = (second, first) if columns in first.axes else (first, second)
    for o, own, other in ((by_row, rows, columns), (by_column, columns, rows)):
        strides = [c for lin in r.nodes[o.node].dims for a, c in lin.coefs if a == own]
        inside = any(own in r.nodes[n].deps for lin in r.nodes[o.node].dims for n, _ in lin.atoms)
        if strides != [1] or inside or other in o.axes:
            raise KernelOptError(f"{kernel.stages[o.stage].name} is not read along {kernel.axes[r.axes[own]].name} position by position, "
                                 f"the same for all of {kernel.axes[r.axes[other]].name}")
    if (by_row.source, by_column.source) != dot.operands:
        raise KernelOptError(f"{dot.name} multiplies {' in rows by '.join(d.name for d in dot.operands)} in columns")
    return by_row, by_column


def check_tiles(state: Scheduler, stage: int) -> None:
    """Raises KernelOptError if the tiles of results, the operands of a row of them and one more operand exceed the tile registers."""
    chosen = state.dots[stage]
    if chosen is None or not DOTS[chosen.name].is_tile or DOTS[chosen.name].fragments:
        return
    results, wide = 1, 1
    s = state.kernel.stages[stage]
    for axis in s.outs + s.reds:
        for row in state.axis_rows[axis]:
            if state.rows[row].role == UPCAST:
                results *= state.rows[row].extent
                wide *= state.rows[row].extent if axis != chosen.rows else 1
    if results + wide + 1 > TILE_REGISTERS:
        raise KernelOptError(f"{results} tiles side by side and {wide + 1} of operands; the target has {TILE_REGISTERS}")


@lru_cache(maxsize=64)
def applicable(kernel: Kernel, target: Target, stage: int) -> tuple[tuple[str, Any], ...]:
    """(reduce axis, argument) of each TC that applies to a stage of a kernel without opts."""
    axes, s, found = kernel.axes, kernel.stages[stage], list[tuple[str, Any]]()
    usable = [d for d in DOTS.values() if d.runs_on(target)]
    for axis in s.reds if usable else ():
        for dot in usable:
            pairs = [(a, b) for a in s.outs for b in s.outs if a != b and axes[a].extent > 1 and axes[b].extent > 1]
            for tile in pairs if dot.is_tile else [(-1, -1)]:
                try:
                    check(kernel, target, stage, axis, dot, tile)
                except KernelOptError:
                    continue
                found.append((axes[axis].name, (dot.name, *[axes[a].name for a in tile]) if dot.is_tile else dot.name))
    return tuple(found)


def normal_power(r: ResolvedStage, node: Node) -> int:
    """The node x of `where(x < -126, 0, 2^x)` in float32, which some targets compute by one instruction (POW2); -1 for another value."""
    if node.op != "WHERE" or node.dtype != dtypes.float32:
        return -1
    tiny, zero, power = (r.nodes[s] for s in node.src)
    if tiny.op != "CMPLT" or (zero.kind, zero.arg) != ("const", 0) or power.op != "EXP2" or tiny.src[0] != power.src[0]:
        return -1
    least = r.nodes[tiny.src[1]]
    return power.src[0] if (least.kind, least.arg) == ("const", LEAST_POWER) else -1


class Packed(NamedTuple):
    """The form in which an operand of a dot instruction is staged. `dim`: the dim that is summed over, cut into groups of `group`; `dtype`:
    the type stored; `flipped`: with the sign bit flipped."""

    dim: int
    group: int
    padded: int                # positions of `dim`, rounded up to whole groups
    dtype: DType
    flipped: bool
    row_dim: int = -1          # the dim of the tiles' rows, or -1; a last tile may go beyond its end
    rows: int = 1
    row_padded: int = 0        # positions of `row_dim`, rounded up to whole tiles, if a subgroup holds them; else 0
    turns: bool = False        # Tiles that a subgroup holds may be stored with `row_dim` innermost.
    line: int = 0              # elements of a 16-byte line of the innermost dim, if the instruction reads shared memory; else 0
    whole_tiles: bool = False  # Tiles begin at multiples of a tile along `row_dim`.

    @property
    def is_held(self) -> bool:
        """Whether a subgroup holds tiles of the operand."""
        return self.row_padded > 0

    def padded_to(self, dim: int) -> int:
        """Positions of a dim with its padding; 0 if the dim is not padded."""
        return self.padded if dim == self.dim else self.row_padded if dim == self.row_dim else 0


def stored_node(r: ResolvedStage, packed: Packed | None) -> int:
    """The node of a stage that is stored: its value, or, for a packed operand, the value before it was widened."""
    value = r.nodes[r.value]
    return r.value if packed is None or value.dtype == packed.dtype else value.src[0]


class TensorizePlan(NamedTuple):
    """The instruction that computes a stage's sums. `operands`, `packed`: in the order of the instruction; `rows`, `columns`: the local
    axes of its tiles, or -1."""

    dot: Dot
    operands: tuple[Operand, Operand]
    packed: tuple[Packed, Packed]
    rows: int
    columns: int

    @property
    def corrects(self) -> int:
        """The number (0 or 1) of the operand whose sum corrects for the flipped sign bits of the other one; -1 if none are flipped."""
        return next((1 - i for i, p in enumerate(self.packed) if p.flipped), -1)


def plan_dot(state: Scheduler, r: ResolvedStage, lane: int) -> TensorizePlan | None:
    """The instruction that TC chose for a stage whose vectors run along local axis `lane` (-1: none)."""
    chosen = state.dots[r.stage.index]
    if chosen is None or not chosen.computes:
        return None
    axis, dot = chosen.axis, DOTS[chosen.name]
    first_dtype, second_dtype = dot.operands
    first, second = operands_of(state.kernel, r, axis)
    flipped: Operand | None = None      # the operand that the instruction takes with the other signedness
    rows = columns = -1
    if dot.is_tile:
        rows, columns = r.axes.index(chosen.rows), r.axes.index(chosen.columns)
        first, second = _by_rows(state.kernel, r, (first, second), dot, (chosen.rows, chosen.columns))
    elif first_dtype != second_dtype:
        if first.source == second.source:
            flipped, other = (second, first) if lane in first.axes and lane not in second.axes else (first, second)
            first, second = (other, flipped) if flipped.source == first_dtype else (flipped, other)
        elif first.source != first_dtype:
            first, second = second, first
    padded = state.axis_extent(axis)
    one, two = (Packed(o.dim, dot.group, padded, dtype, o is flipped) for o, dtype in ((first, first_dtype), (second, second_dtype)))
    if dot.fragments:
        one, two = (_whole_tiles(state, r, o, p, a, dot) for o, p, a in ((first, one, rows), (second, two, columns)))
    elif dot.is_tile:
        row_dim = next(i for i, lin in enumerate(r.nodes[first.node].dims) if lin.coef(rows))
        one = one._replace(row_dim=row_dim, rows=dot.rows)
    return TensorizePlan(dot, (first, second), (one, two), rows, columns)


def _whole_tiles(state: Scheduler, r: ResolvedStage, o: Operand, packed: Packed, a: int, dot: Dot) -> Packed:
    """`packed`, with its positions along the dim that local axis `a` moves rounded up to the whole tiles of the axis. `o`: the operand."""
    dims, size = r.nodes[o.node].dims, packed.dtype.itemsize
    dim = next(i for i, lin in enumerate(dims) if lin.coef(a))
    axes, own = state.kernel.axes, r.axes[a]
    beyond = prod(state.rows[row].extent for row in state.axis_rows[own]) - axes[own].extent
    alone = dims[dim] == LinearIndex(((a, 1),), 0, ())
    return packed._replace(row_dim=dim, row_padded=axes[state.kernel.stages[o.stage].outs[dim]].extent + max(0, beyond),
                           turns=size == 2 and alone if dot.reads_shared else size > 1,
                           line=MATRIX_LINE_BYTES // size if dot.reads_shared else 0, whole_tiles=alone)


def held_threads(state: Scheduler, stage: int) -> int:
    """The number of threads of a subgroup that hold the tiles of a stage; 1 if none do."""
    chosen = state.dots[stage]
    return DOTS[chosen.name].threads if chosen is not None else 1


def held_layout(state: Scheduler, stage: int) -> Fragment | None:
    """The elements of a tile that each thread has, if HOLD has laid out the stage; None for other stages."""
    chosen = state.dots[stage]
    if chosen is None or chosen.computes:
        return None
    fragments = DOTS[chosen.name].fragments
    assert fragments is not None
    return fragments[0]


def sharing_digits(state: Scheduler, stage: int) -> list[tuple[int, int]]:
    """For a stage laid out by HOLD with columns along a reduce axis: the digits of the thread number t in which the threads that share a
    reduction differ. (inner, extent) each, with digit t // inner % extent. [] for other stages."""
    chosen, fragment = state.dots[stage], held_layout(state, stage)
    if chosen is None or fragment is None or chosen.columns not in state.kernel.stages[stage].reds:
        return []
    digits, inner = list[tuple[int, int]](), 1
    for d in reversed(fragment.threads):
        if d.columns:
            digits.append((inner, d.extent))
        inner *= d.extent
    return digits


def shuffles_of(state: Scheduler, stage: int) -> list[int]:
    """The XOR masks of the shuffles by which the threads that share a reduction of the stage combine their results, one for each bit of
    `sharing_digits`."""
    bits = [range(inner.bit_length() - 1, (inner * extent).bit_length() - 1) for inner, extent in sharing_digits(state, stage)]
    return [1 << k for own in bits for k in own]


# the four threads that share a row of eight results, and the two neighbouring results that each of them has
QUAD, RUN = Digit(4, 0, 2), Digit(2, 0, 1)
LINE_OF_QUAD = QUAD.extent * RUN.extent


def exchanges_results(state: Scheduler, r: ResolvedStage, plan: TensorizePlan) -> bool:
    """Whether threads that share rows of results exchange results before storing. Each then stores one line of 16 bytes instead of one word
    in each of four lines."""
    fragments, store, axes = plan.dot.fragments, r.store, state.kernel.axes
    if fragments is None or store is None or state.target.subgroup < QUAD.extent or cut_of(state, r.stage.index) is not None:
        return False
    results, columns = fragments[0], axes[r.axes[plan.columns]]
    beside = prod(state.rows[row].extent for row in state.axis_rows[columns.index] if state.rows[row].role == UPCAST)
    beside *= prod(d.extent for d in results.elements[:-1] if d.columns)
    whole = all(n % LINE_OF_QUAD == 0 for n in (columns.extent, store.const, *[c for a, c in store.coefs if a != plan.columns]))
    return (results.threads[-1], results.run) == (QUAD, RUN) and beside % QUAD.extent == 0 and whole and not store.atoms \
        and store.coef(plan.columns) == 1 and LINE_OF_QUAD * r.nodes[r.value].dtype.itemsize == MATRIX_LINE_BYTES


class DotRate(NamedTuple):
    """The cost of a stage's dot instruction. `group`: products per instruction and lane; `cost`: its time in multiply-adds; `corrects`:
    whether it needs a correction."""

    group: int
    cost: float
    corrects: bool
    load: float = 1.0          # time of an operand's load, in vector loads
    store: float = 1.0         # time of a result's store, in vector stores


def rate_of(plan: TensorizePlan | None, target: Target) -> DotRate:
    """The rate of the instruction that computes a stage's sums; a plain multiply-add without a plan."""
    if plan is None:
        return DotRate(1, 1.0, False)
    dot = plan.dot
    if dot.is_tile:
        return DotRate(dot.rows * dot.positions, dot.cost(target), False, float(dot.rows), 3.0 * dot.rows)
    return DotRate(dot.group, dot.cost(target), plan.corrects >= 0)


def packed_stages(state: Scheduler) -> frozenset[int]:
    """The stages that are operands of dot instructions."""
    stages: set[int] = set()
    for s, chosen in enumerate(state.dots):
        if chosen is not None and chosen.computes:
            r = state.kernel.resolve(frozenset())[s]
            assert r is not None
            stages.update(o.stage for o in operands_of(state.kernel, r, chosen.axis))
    return frozenset(stages)
