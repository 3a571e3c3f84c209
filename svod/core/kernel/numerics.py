"""Numerics policies, and the canonical order of each sum under the policy "same".

    float32     chains may add the terms of a sum in any order, and compute convolutions by WINOGRAD, whose errors are larger than those of
                sums; a search accepts each chain whose error is within its bound
    same        chains add the terms of each sum in one order, a function of the kernel: all of them compute the same bits
    fast        as float32, and factors of products may be rounded to bfloat16, within an error of a plan's outputs (`svod.tune.fast`)

The canonical order of a stage depends on its expression, on its reduce axes, and on the memory that it reads: neither on the extents of
output axes, such as the rows of a batch, nor on threads, nor on vector registers. Reduce axes are walked in the order of the AST, the last
one innermost. Long sums are cut into blocks (`svod.core.ir.summation`), at positions that follow from the reduce axes alone.

    products of two operands, sums of strided memory    one accumulator for each result; vectors run along output axes
    sums along contiguous memory, products without      `lanes` accumulators: position p of the last reduce axis is added to number
      an axis of their own                              p mod `lanes`, and at the end halves are added to halves; of very long rows
                                                        in parts, which cores may share

A sum of one term more than another one, or of other operands, may have another order. Integers, maxima, minima and logical reductions do
not round, so that their order is free."""
from __future__ import annotations

from typing import NamedTuple

from svod.core.ir.summation import blocked_nest
from svod.core.kernel.kernel import Kernel, LinearIndex, ResolvedStage, own_reduces, reachable, reduce_parts

ORDERED = frozenset({"ADD", "MUL", "EXPSUM"})   # combiners whose result depends on the order, for floats
LANE_BYTES = 256                # bytes of the accumulators of a sum along contiguous memory
FEW_LANES = 8                   # a shorter axis has one accumulator
VARIABLE_LANES = 16             # accumulators of a sum along an axis whose extent is a variable: its last ones are masked
LONGEST_WHOLE = 1 << 16         # positions from which on the sums of a kernel's output are cut into parts, which cores share
PART = 1 << 14                  # least positions of a part
MOST_PARTS = 64


class CanonicalSum(NamedTuple):
    """The order in which a stage adds. `lanes`: accumulators along the last reduce axis; `blocks`: for each reduce axis the positions of a
    block, of each level of blocks, innermost first; `chunk`: positions of a part of the only reduce axis, `parts` of which are summed by
    themselves, and then added one after the other."""

    lanes: int
    blocks: tuple[tuple[int, ...], ...]
    parts: int = 1
    chunk: int = 0

    def unit(self, number: int) -> int:
        """The positions of reduce axis `number` that are added side by side."""
        return self.lanes if number == len(self.blocks) - 1 else 1


def canonical_sum(kernel: Kernel, s: int) -> CanonicalSum | None:
    """The canonical order of stage `s`, computed once per kernel; None if its order is free."""
    if s not in kernel.canonical_sums:
        kernel.canonical_sums[s] = _canonical_sum(kernel, s) if _rounds(kernel, s) else None
    found: CanonicalSum | None = kernel.canonical_sums[s]
    return found


def _rounds(kernel: Kernel, s: int) -> bool:
    """Whether the order of a stage's reductions changes its value."""
    return any(u.arg[0] in ORDERED and u.src[0].dtype.is_float for u in own_reduces(kernel.stages[s].value))


def _canonical_sum(kernel: Kernel, s: int) -> CanonicalSum:
    stage = kernel.stages[s]
    lanes, extents = _lanes(kernel, s), [kernel.axes[a].extent for a in stage.reds]
    units = [1] * (len(extents) - 1) + [lanes]
    parts = _parts(kernel, s, extents) if lanes > 1 else 1
    chunk = -(-extents[-1] // (parts * lanes)) * lanes if parts > 1 else 0
    if chunk:
        extents = [chunk]
    blocks: list[tuple[int, ...]] = [()] * len(extents)
    if stage.sum_rule is not None:
        nest = blocked_nest(stage.sum_rule, [-(-e // unit) for e, unit in zip(extents, units, strict=True)], 1)
        blocks = [tuple([n * unit for n in loop.sizes]) for loop, unit in zip(nest.loops, units, strict=True)]
    return CanonicalSum(lanes, tuple(blocks), parts, chunk)


def _parts(kernel: Kernel, s: int, extents: list[int]) -> int:
    """The number of parts of a long sum, from its length alone, so that the bits do not depend on the cores that share them."""
    is_alone = s == kernel.output and sum(q.is_output for q in kernel.stages) == 1 and len(extents) == 1
    if not is_alone or extents[0] < LONGEST_WHOLE or kernel.axes[kernel.stages[s].reds[0]].bound is not None:
        return 1
    return min(MOST_PARTS, extents[0] // PART)


def _lanes(kernel: Kernel, s: int) -> int:
    """The number of accumulators along the last reduce axis of a stage."""
    stage = kernel.stages[s]
    axis = kernel.axes[stage.reds[-1]]
    widest = max([v.dtype.itemsize for u in own_reduces(stage.value) for v in reduce_parts(u)[0]])
    most = min(VARIABLE_LANES if axis.bound is not None else LANE_BYTES // max(4, widest), axis.extent)
    if most < FEW_LANES or not _is_along_memory(kernel, s):
        return 1
    return 1 << (most.bit_length() - 1)


def _is_along_memory(kernel: Kernel, s: int) -> bool:
    """Whether a stage adds numbers that lie beside each other, and has no output axis for its vectors instead."""
    r = kernel.resolve(frozenset([q.index for q in kernel.stages if not q.is_output and not q.has_reduce]))[s]
    assert r is not None        # only elementwise stages are inlined
    last = len(r.axes) - 1
    wide = [a for a in range(len(r.stage.outs)) if kernel.axes[r.axes[a]].extent > 1]
    found = [access for access in _accesses(r) if access.is_summed]
    if not any(access.is_unit(last) for access in found) or any(access.is_unit(a) for access in found for a in wide):
        return False
    own = _axes_of_factors(r, wide)
    if own is None or not (own[0] | own[1]):
        return True
    return not (own[0] and own[1]) and _is_of_weights(kernel, r, 1 if own[0] else 0)


def _is_of_weights(kernel: Kernel, r: ResolvedStage, vector: int) -> bool:
    """Whether factor number `vector` of a matrix and a vector is a weight and the matrix is none. Otherwise the vector is a row of a
    batch."""
    factors = _factors(r)
    slots = [_loads_of(r, factors[k]) for k in (vector, 1 - vector)]
    of_vector, of_matrix = [bool(own) and all(kernel.params[slot].arg.constant for slot in own) for own in slots]
    return of_vector and not of_matrix


def _accesses(r: ResolvedStage) -> list[_Access]:
    """The loads, and the reads of stages, of a stage's reductions."""
    summed = reachable(r.nodes, [v for red in r.reductions for v in red.values])
    return [_Access(r, n) for n in summed if r.nodes[n].kind in ("load", "read")]


class _Access:
    """A load, or a read of a stage, by a reduction. The last dim of a value that a stage holds is contiguous."""

    def __init__(self, r: ResolvedStage, node: int) -> None:
        n = r.nodes[node]
        self.dims: tuple[LinearIndex, ...] = n.dims if n.linear is None else (n.linear,)
        self.is_summed = any(a >= len(r.stage.outs) for a in n.deps)
        self.moved = [a for lin in self.dims for x, _ in lin.atoms for a in r.nodes[x].deps]

    def is_unit(self, a: int) -> bool:
        """Whether the access moves by one element along local axis `a`."""
        return bool(self.dims) and self.dims[-1].coef(a) == 1 and not any(d.coef(a) for d in self.dims[:-1]) and a not in self.moved


def _factors(r: ResolvedStage) -> list[int]:
    """The nodes of the two operands whose product a stage sums; [] if it sums something else, or a value times itself."""
    value = _below_casts(r, r.reductions[0].values[0])
    if len(r.reductions) != 1 or r.reductions[0].combiner != "ADD" or r.nodes[value].op != "MUL":
        return []
    x, y = [_below_casts(r, n) for n in r.nodes[value].src]
    return [] if x == y else [x, y]


def _below_casts(r: ResolvedStage, n: int) -> int:
    while r.nodes[n].kind == "cast":
        n = r.nodes[n].src[0]
    return n


def _axes_of_factors(r: ResolvedStage, wide: list[int]) -> tuple[frozenset[int], frozenset[int]] | None:
    """Of the output axes `wide`, those that only the first of two factors has, and those that only the second has; None for a sum of
    something else."""
    factors, outs = _factors(r), len(r.stage.outs)
    if not factors or not all(any(a >= outs for a in r.nodes[n].deps) for n in factors):
        return None
    x, y = (frozenset([a for a in r.nodes[n].deps if a in wide]) for n in factors)
    return x - y, y - x


def _loads_of(r: ResolvedStage, node: int) -> list[int]:
    """The slots of the arguments that a value is computed from."""
    return [r.nodes[n].arg for n in reachable(r.nodes, [node]) if r.nodes[n].kind == "load"]

