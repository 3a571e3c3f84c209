"""Predicted cycles of Fourier transforms, and rough ones of a convolution by them: which block lengths are worth a schedule.

    direct      multiply-adds in vectors
    by blocks   transforms of the blocks; products of frequencies, or the time to fetch their matrices; transforms of the products

All cycles are those of a target's cores together, as `svod.core.cost` predicts them.
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2, prod

from svod.core.convolution.by_fourier import ConvolutionSizes, Lengths
from svod.core.cost.caches import PAGE_BYTES, caches_of
from svod.core.graph.library_kernel import filter_pairs, fourier_passes
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.machine.levels import CACHE_LINE_BYTES
from svod.core.machine.target import Target

ISSUED_PER_CYCLE = 2.0      # vector instructions per cycle
SUMMED_SHARE = 0.8          # operations of a transform by radices of 8 and 16 over 5·log2 n, those of one by radix 2
ROTATION = 6.0              # operations that multiply a number by a root of unity between two passes
MOVES = 4.0                 # loads and stores of both parts of a number in a pass
FILTER_ARRAYS = 10          # arrays of n numbers that FILTER uses: both parts of two areas, of the factors, of both tables
PASS_ARRAYS = 6             # arrays of n numbers that a pass of FILTER reads or writes
CONFLICTS = 1.4             # time of a pass whose numbers are a multiple of a page apart, over that of another pass
MOST_OF_BLOCK = 1 << 15     # positions of a block along an axis: scratch memory of its transform stays in the second cache
FACTORS = (4, 5, 6, 7)      # block lengths are these times powers of two
FEWER_PRODUCTS = 0.5        # predicted cycles of WINOGRAD over those of a direct convolution's multiply-adds: 0.6 to 1.4
SLOWEST = 5.0               # predicted cycles of a convolution without WINOGRAD over those of its multiply-adds: 1.4 to 4.7
MOST_WINOGRAD_TAPS = 7      # taps along an axis of which WINOGRAD computes two results at a time
LEAST_OF_ALL_BLOCKS = 64    # positions of a block that are tried for few taps too
MOST_TAP_LENGTHS = 16       # most length of a block, in lengths of the taps


def transform_cycles(numbers: int, n: int, dtype: DType, target: Target) -> float:
    """The predicted cycles of FOURIER of `numbers` complex numbers in all, n at a time."""
    return _pass_cycles(numbers, n, dtype, target) + moved_cycles(2 * numbers * dtype.itemsize, 2 * numbers * dtype.itemsize, target)


def _pass_cycles(numbers: int, n: int, dtype: DType, target: Target) -> float:
    passes = len(fourier_passes(n))
    operations = 5 * SUMMED_SHARE * log2(max(n, 2)) + ROTATION * (passes - 1) + MOVES * passes
    return numbers * operations / (target.lanes(dtype) * ISSUED_PER_CYCLE * target.threads)


def moved_cycles(read: int, written: int, target: Target) -> float:
    """The predicted cycles to read and to write so many bytes in order; a line that is written is fetched first."""
    caches = caches_of(target)
    _, second, third = caches.levels
    lines = (read + 2 * written) / CACHE_LINE_BYTES
    far = caches.lost((read + written) / min(third.size, caches.own_share))
    return lines * (second.streamed + far * third.streamed) / target.threads


def filter_cycles(pairs: int, n: int, read: int, written: int, dtype: DType, target: Target) -> float:
    """The predicted cycles of FILTER of so many pairs of blocks, from and to so many bytes. Scratch memory, roots and factors of a pair are
    in the second cache, as far as they fit; where the numbers of a pass are a multiple of a page apart, they evict each other from the
    first one."""
    caches, passes, numbers = caches_of(target), fourier_passes(n), n * dtype.itemsize
    lost = caches.lost(FILTER_ARRAYS * numbers / caches.levels[1].size)
    fetched = pairs * 2 * len(passes) * PASS_ARRAYS * lost * numbers / CACHE_LINE_BYTES * caches.levels[1].streamed / target.threads
    conflicts = CONFLICTS if numbers // max(passes) % PAGE_BYTES == 0 else 1.0
    return 2 * conflicts * _pass_cycles(pairs * n, n, dtype, target) + fetched + moved_cycles(read, written, target)


def library_cycles(node: UOp, target: Target) -> float:
    """The predicted cycles of a FOURIER or FILTER of the kernel level."""
    name, options, shapes = node.arg
    if name == "FILTER":
        (outer, channels, m), *_, (_, n) = shapes
        size, rows = node.dtype.itemsize, outer * channels
        read = (rows * m + 2 * channels * n) * size
        return filter_cycles(rows * filter_pairs(options), n, read, rows * options[2] * size, node.dtype, target)
    outer, n, inner = shapes[0][:3]
    return transform_cycles(outer * n * inner, n, node.dtype, target)


def block_lengths(z: ConvolutionSizes) -> Iterator[Lengths]:
    """Lengths of blocks: those along each axis that are no longer than the image needs, and not many times as long as the taps; 1 along an
    axis with one tap, where positions do not meet."""
    axes = []
    for k, y in zip(z.taps, z.results, strict=True):
        whole = next(n for n in _lengths() if n >= min(y + k - 1, MOST_OF_BLOCK))
        most = min(whole, max(MOST_TAP_LENGTHS * k, LEAST_OF_ALL_BLOCKS))
        shortest = {-(-y // (n - k + 1)): n for n in reversed(_lengths()) if k < n <= most}      # by the number of blocks
        axes.append(sorted(shortest.values()) if k > 1 else [1])
    yield from product(*axes)


def _lengths() -> list[int]:
    return sorted({f << e for f in FACTORS for e in range(14) if f << e <= MOST_OF_BLOCK})


def rough_cycles(z: ConvolutionSizes, lengths: Lengths, is_constant: bool, dtype: DType, target: Target) -> float:
    """Rough cycles of a convolution by transforms of blocks. `is_constant`: the weights are, and are transformed at prepare."""
    weights, size = z.groups * z.inputs * z.outputs * prod(lengths), dtype.itemsize
    cycles = _filter_cycles(z, lengths, dtype, target) if z.is_filter(lengths) else _block_cycles(z, lengths, dtype, target)
    if not is_constant:
        cycles += sum(transform_cycles(weights, n, dtype, target) for n in lengths)
        cycles += moved_cycles(2 * weights * size, (6 if z.sums_channels else 4) * weights * size, target)
    return cycles


def _filter_cycles(z: ConvolutionSizes, lengths: Lengths, dtype: DType, target: Target) -> float:
    """Rough cycles of FILTER, whose rows of images are taken to be as long as those of results."""
    rows, n = z.images * z.groups * z.results[0] * dtype.itemsize, lengths[0]
    return filter_cycles(z.pairs(lengths) * z.groups, n, rows + 2 * z.groups * n * dtype.itemsize, rows, dtype, target)


def _block_cycles(z: ConvolutionSizes, lengths: Lengths, dtype: DType, target: Target) -> float:
    """Rough cycles of transforms along each axis and of the products between them, without those of the weights."""
    pairs, frequencies, size = z.pairs(lengths), prod(lengths), dtype.itemsize
    inputs, outputs = (pairs * z.groups * channels * frequencies for channels in (z.inputs, z.outputs))
    weights = z.groups * z.inputs * z.outputs * frequencies
    cycles = sum(transform_cycles(inputs, n, dtype, target) + transform_cycles(outputs, n, dtype, target) for n in lengths)
    cycles += moved_cycles(2 * inputs * size, 2 * inputs * size, target) + moved_cycles(2 * outputs * size, 0, target)
    if not z.sums_channels:
        return cycles + moved_cycles(2 * (inputs + weights) * size, 2 * outputs * size, target)
    sums = 4.0 * pairs * weights / (target.lanes(dtype) * ISSUED_PER_CYCLE * target.threads)
    return cycles + max(sums, moved_cycles(4 * weights * size + 2 * inputs * size, 2 * outputs * size, target))


def most_direct_cycles(z: ConvolutionSizes, dtype: DType, target: Target) -> float:
    """Cycles that a direct convolution is not predicted to exceed by much, from its multiply-adds: with fewer of them where it sums
    channels and has few taps along each axis (WINOGRAD), else at a part of the speed of whole vectors, two at a time."""
    products = z.images * z.groups * z.inputs * z.outputs * prod(z.taps) * prod(z.results)
    share = FEWER_PRODUCTS if z.inputs > 1 and max(z.taps) <= MOST_WINOGRAD_TAPS else SLOWEST
    return share * products / (target.lanes(dtype) * ISSUED_PER_CYCLE * target.threads)
