"""Limits on the additions that an accumulator takes in a row, which keep the rounding error of long sums of floats small.

    for r in 100000: acc += x[r]    →    for a in 100000 by 32768: { s = 0;  for b in 32768 by 1024: { t = 0;  for c in 1024 by 32: {
                                             u = 0;  for r in 32: u += x[r];  t += u };  s += t };  acc += s }

An addition rounds relative to the sum so far, so a chain of n additions may lose n·u of Σ|x|, where u is the unit roundoff: 2e-2 for 2^22
equal numbers of float32. Blocks of 16 lose as little as the cascade of PyTorch, which adds 2^4 to 2^6 numbers a level. Lowering cuts each
loop that would make a chain longer than `SumRule.longest` into blocks with accumulators of their own, whatever opts a kernel has. Lanes,
partial results of UPCAST, threads of GROUP, and parts of THREAD and SPLITK make chains shorter; UNROLL and TILE do not.

A sum of products of two values has longer blocks, as in libraries of linear algebra: its tile of accumulators may take all registers, and
then each block ends with stores and loads of all of them. Where both factors have at most 16 bits they are further from what they stand
for than the sum of their products is from its true value, so its blocks are longer still.

Integers, extrema and products need no blocks: they do not round, or each operation rounds relative to the result, in any order.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp


class SumRule(NamedTuple):
    """The lengths of chains of additions."""

    longest: int        # additions in a row without blocks
    block: int          # additions of a block


SUMS = SumRule(64, 16)
PRODUCTS = SumRule(384, 384)
NARROW_PRODUCTS = SumRule(8192, 128)
SUMMING = ("ADD", "EXPSUM")     # the combiners that add; those of EXPSUM are sums of products


def sum_rule(reduce: UOp) -> SumRule | None:
    """The rule of a REDUCE; None if it adds no floats. A value times a mask counts as a plain sum: all its terms may be equal."""
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
    """A value before it was converted to another type, or kept in a stage."""
    while x.op is Ops.CAST or (x.op is Ops.INDEX and x.src[0].op is Ops.STAGE):
        x = x.src[0] if x.op is Ops.CAST else x.src[0].src[0]
    return x


class BlockedLoop(NamedTuple):
    """A loop around the additions of an accumulator."""

    sizes: tuple[int, ...]      # iterations of a block, level by level, the innermost first; (): the loop has no blocks
    additions: int              # additions that a run of the loop makes to the accumulator around it


class BlockedNest(NamedTuple):
    """A nest of loops around the additions of an accumulator."""

    positions: BlockedLoop              # the positions of an iteration, as straight-line code
    loops: tuple[BlockedLoop, ...]      # outermost first
    adds_to_memory: bool                # whether accumulators in memory take a sum from each run of the loops inside

    @property
    def is_cut(self) -> bool:
        """Whether any sum has blocks."""
        return self.adds_to_memory or bool(self.positions.sizes) or any(loop.sizes for loop in self.loops)


def blocked_loop(rule: SumRule, iterations: int, additions: int) -> BlockedLoop:
    """The blocks of a loop of so many iterations, each of which makes `additions`, not more than the longest chain."""
    if iterations * additions <= rule.longest:
        return BlockedLoop((), iterations * additions)
    sizes, left, most = [1], iterations, max(1, rule.block // additions)
    while len(sizes) == 1 or left > rule.block:
        sizes.append(sizes[-1] * _block_size(left, most))
        left, most = -(-iterations // sizes[-1]), rule.block
    return BlockedLoop(tuple(sizes[1:]), left)


def _block_size(iterations: int, most: int) -> int:
    """Iterations of a block. Without a remainder it is a loop whose length is known."""
    return next((n for n in range(most, -(-2 * most // 3) - 1, -1) if iterations % n == 0), most)


def blocked_nest(rule: SumRule, iterations: Sequence[int], positions: int, memory: int = -1) -> BlockedNest:
    """The blocks of a nest of loops, given outermost first; output loops, each iteration of which has accumulators of its own, count as
    one iteration. `memory`: the number of loops inside which accumulators are read from memory and written back; -1: they are carried."""
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
    """The most additions between one of `terms` terms and their sum in a program that keeps the law: a chain leaves one number for all its
    terms, and so does its remainder."""
    levels, left = 0, terms
    while left > rule.longest:
        levels, left = levels + 1, -(-left // rule.longest)
    return 2 * levels * rule.longest + left
