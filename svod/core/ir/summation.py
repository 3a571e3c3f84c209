"""Blocks of long sums of floats: they limit how many additions one accumulator takes in a row, which keeps the rounding error small.

    for r in 100000: acc += x[r]    →    for a in 100000 by 32768: { s = 0;  for b in 32768 by 1024: { t = 0;  for c in 1024 by 32: {
                                             u = 0;  for r in 32: u += x[r];  t += u };  s += t };  acc += s }

An addition rounds relative to the sum so far, so a chain of n additions may lose n·u of Σ|x|, where u is the unit roundoff: 2e-2 for 2^22
equal numbers of float32. With blocks of 16 the error is as small as that of PyTorch's cascade sum, which adds 2^4 to 2^6 numbers on each
level. Lowering cuts each loop that would make a chain of more than `SumRule.longest` additions into blocks, each with a separate
accumulator, whatever opts a kernel has. Lanes, partial results of UPCAST, threads of GROUP, and parts of THREAD and SPLITK make chains
shorter; UNROLL and TILE do not.

A sum of products of two values has longer blocks, as in libraries of linear algebra: its tile of accumulators may take all registers, and
then each block ends with stores and loads of all of them. If both factors have at most 16 bits, the blocks are longer still: the rounding
of the factors to 16 bits already costs more accuracy than the sum loses.

Integer sums, extrema and products need no blocks: integers and extrema do not round, and each multiplication rounds relative to the
product, so the order does not matter.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp


class SumRule(NamedTuple):
    """The permitted lengths of chains of additions to one accumulator."""

    longest: int        # most additions of a chain that needs no blocks
    block: int          # additions of one block of a longer chain


SUMS = SumRule(64, 16)
PRODUCTS = SumRule(384, 384)
NARROW_PRODUCTS = SumRule(8192, 128)
SUMMING = ("ADD", "EXPSUM")     # the combiners that add numbers; EXPSUM adds products


def sum_rule(reduce: UOp) -> SumRule | None:
    """Return the rule for a REDUCE; None if it adds no floats. A sum of x·x, or of a value times a constant or a bool, counts as a plain
    sum and not as a sum of products."""
    combiner, values = reduce.arg[0], reduce.src[:reduce.arg[1]]
    if combiner not in SUMMING or not values[0].dtype.is_float:
        return None
    if combiner == "EXPSUM":
        return PRODUCTS
    term = _before_conversions(values[0])
    if term.op is not Ops.MUL:
        return SUMS
    factors = tuple(_before_conversions(v) for v in term.src)
    if factors[0] is factors[1] or any(f.op is Ops.CONST or f.dtype == dtypes.bool for f in factors):
        return SUMS
    return NARROW_PRODUCTS if all(f.dtype.itemsize <= 2 for f in factors) else PRODUCTS


def _before_conversions(x: UOp) -> UOp:
    """Return the value under the CASTs of x and the stages that x reads."""
    while x.op is Ops.CAST or (x.op is Ops.INDEX and x.src[0].op is Ops.STAGE):
        x = x.src[0] if x.op is Ops.CAST else x.src[0].src[0]
    return x


class BlockedLoop(NamedTuple):
    """A loop around the additions of an accumulator."""

    sizes: tuple[int, ...]      # iterations of one block for each level of blocks, innermost first; (): the loop has no blocks
    additions: int              # additions that one run of the loop makes to the enclosing accumulator


class BlockedNest(NamedTuple):
    """A nest of loops around the additions of an accumulator."""

    positions: BlockedLoop              # the unrolled positions within one iteration, treated as a loop
    loops: tuple[BlockedLoop, ...]      # the loops, outermost first
    adds_to_memory: bool                # whether the inner loops sum in separate accumulators, whose sum is added to memory after each run

    @property
    def is_cut(self) -> bool:
        """Whether any loop has blocks, or the inner loops' sums are added to memory."""
        return self.adds_to_memory or bool(self.positions.sizes) or any(loop.sizes for loop in self.loops)


def blocked_loop(rule: SumRule, iterations: int, additions: int) -> BlockedLoop:
    """Compute the blocks of a loop of `iterations`, each of which makes `additions` to the accumulator, at most `rule.longest`."""
    if iterations * additions <= rule.longest:
        return BlockedLoop((), iterations * additions)
    sizes, left, most = [1], iterations, max(1, rule.block // additions)
    while len(sizes) == 1 or left > rule.block:
        sizes.append(sizes[-1] * _block_size(left, most))
        left, most = -(-iterations // sizes[-1]), rule.block
    return BlockedLoop(tuple(sizes[1:]), left)


def _block_size(iterations: int, most: int) -> int:
    """Choose the iterations of a block: the largest divisor of `iterations` from `most` down to two thirds of it, so that no shorter block
    remains; `most` if there is no such divisor."""
    return next((n for n in range(most, -(-2 * most // 3) - 1, -1) if iterations % n == 0), most)


def blocked_nest(rule: SumRule, iterations: Sequence[int], positions: int, memory: int = -1) -> BlockedNest:
    """Compute the blocks of a nest of loops. `iterations`: of each loop, outermost first; 1 for an output loop, each iteration of which has
    separate accumulators. `positions`: unrolled positions within one iteration. `memory`: the number of outer loops inside which the
    accumulators are loaded from memory and stored back; -1: the accumulators stay in registers."""
    innermost = blocked_loop(rule, positions, 1)
    additions, adds_to_memory = innermost.additions, False
    loops: list[BlockedLoop] = []
    for k in range(len(iterations), 0, -1):
        if k == memory and additions * prod(iterations[:k]) > rule.longest:
            additions, adds_to_memory = 1, True
        loops.append(blocked_loop(rule, iterations[k - 1], additions))
        additions = loops[-1].additions
    return BlockedNest(innermost, tuple(reversed(loops)), adds_to_memory)


def longest_path(rule: SumRule, terms: int) -> int:
    """Bound the additions that any one of `terms` terms takes part in before it is in the total, for a program that follows `rule`. Each
    level of blocks reduces `rule.longest` terms to one and may have a remainder, so it counts twice."""
    levels, left = 0, terms
    while left > rule.longest:
        levels, left = levels + 1, -(-left // rule.longest)
    return 2 * levels * rule.longest + left
