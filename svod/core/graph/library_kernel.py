"""Library kernels (scans, sorting, scatter, Fourier transforms). Their loops carry values from one iteration to the next, or are several,
so they are no loop nests for opts.

    CUSTOM_FUNCTION(x, …)   arg = (name, options)                          graph: operands and result have the shapes below
    CUSTOM_FUNCTION(PARAM, …)   arg = (name, options, operand shapes)      kernel: the value of its only STORE, which has no ranges

| name | options | operands | result |
| --- | --- | --- | --- |
| SCAN | combiner | x (o, n, k) | (o, n, k): along n, the combination of all elements up to and including each position |
| ARGSORT | descending | x (r, n) | (r, n): positions in order; equal elements keep theirs, a NaN is the largest |
| SORT | descending | x (r, n) | (r, n): the elements in that order, -0 before 0 |
| TOPK | k, largest | x (r, n) | (r, k): positions of the k first in that order |
| FOURIER | inverse, pairs in, out | (o, n, k, 2), or both parts (o, n, k); table | its transform along n: (o, n, k, 2) or (2, o, n, k) |
| TURNED_FOURIER | inverse, pairs out | both parts (o, k, n); table; both parts of factors (k, n) | that of the products, as above |
| UNPAIRED | pairs out | both parts (o, h); cosines, sines (h + 1) | (o, h + 1, 2) or (2, o, h + 1), as below |
| FILTER | zeros before, step, results | x (o, c, m); tables of n; inverse table; both parts of factors (c, n) | (o, c, results), as below |
| SCATTER | reduction | base (o, n, k), index (o, m, k), value (o, m, k) | base with the values put in: y[o, index[o, j, k], k] |

FOURIER does not scale. `fourier_table` makes its table. Complex numbers are pairs, or a real and an imaginary part apart.

UNPAIRED makes the first h + 1 numbers of the transform of 2·h real numbers, of the transform of their h pairs as complex numbers. Cosines
and sines are those of the roots of unity of 2·h positions.

FILTER cuts rows, with zeros around them, into blocks of n positions of which each begins `step` after the one before, multiplies the
transform of a block by the factors, and has the real parts of the first `step` positions of its inverse transform as results. Two blocks
are transformed as one of complex numbers, so factors are those of a transform of real numbers.

A CUSTOM_FUNCTION may also be a function of Python (`svod.core.graph.callback`).

A library kernel has one form: its operands are buffers, nothing is fused into it, it takes no opts, and no search tunes it.
`svod.compile.lower.library` writes its loops. Its cost is counted as one combination per element of SCAN and per value of SCATTER, as
n·log2(n) comparisons per row of ARGSORT and n·log2(k) of TOPK, as 5·n·log2(n) operations per column of FOURIER, twice as many for each
pair of blocks of FILTER, and as 12 for each number of UNPAIRED. This module has the shapes and the costs; `svod.core.spec.library_kernels`
defines the results in NumPy.

Combiners of SCAN: ADD, MUL, MAX, MIN, LOGADDEXP; ARGMAX and ARGMIN give the position of the running extremum, the last one of equal
elements; a NaN counts as the extremum. Reductions of SCATTER: SET (the last value wins), ADD, MUL, MAX, MIN. A negative index of SCATTER
counts from the end; values whose index is out of range are skipped. Its index and value may have 1 instead of o, m or k, which repeats
their elements.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.core.graph.callback import callback_shape, is_callback
from svod.core.ir.dtype import DType, accumulator
from svod.core.ir.uop import Ops, UOp
from svod.errors import DTypeError, ShapeError, UnsupportedError

Shape = tuple[int, ...]
Options = tuple[Any, ...]

SCAN_OPERATIONS = ("ADD", "MUL", "MAX", "MIN", "LOGADDEXP", "ARGMAX", "ARGMIN")
SCATTERS = ("SET", "ADD", "MUL", "MAX", "MIN")
MOST_ROW = 2 ** 31 - 1     # positions within a row are kept as int32 while it is sorted

LARGEST_PRIME = 13         # largest prime factor of a length that FOURIER transforms
FIRST_RADIX = (16, 32)     # least and largest radix of the first pass, so that later passes have whole vectors
MOST_RADIX = 16            # largest radix of a later pass

_OF_TRANSFORMS = "FOURIER", "TURNED_FOURIER", "UNPAIRED", "FILTER"
_RANKS: dict[str, tuple[int, ...]] = {"SCAN": (3,), "SORT": (2,), "ARGSORT": (2,), "TOPK": (2,), "SCATTER": (3, 3, 3)}


def result_shape(name: str, options: Options, shapes: Sequence[Shape], types: Sequence[DType]) -> Shape:
    """Return the shape of a library kernel's result. Raises ShapeError, DTypeError, and UnsupportedError for an unknown name or option."""
    if name in ("FOURIER", "TURNED_FOURIER"):
        return _transformed_shape(name, options, shapes, types)
    if name == "FILTER":
        return _filtered_shape(options, shapes, types)
    if name == "UNPAIRED":
        return _unpaired_shape(options, shapes, types)
    if name not in _RANKS:
        raise UnsupportedError(f"CUSTOM_FUNCTION {name!r}: svod knows {', '.join([*_RANKS, *_OF_TRANSFORMS])}")
    if tuple(len(s) for s in shapes) != _RANKS[name] or any(0 in s for s in shapes):
        raise ShapeError(f"{name} of {' and '.join(map(str, shapes))}: it takes operands with {_RANKS[name]} axes that have elements")
    if name == "SCAN":
        _known(name, options[0], SCAN_OPERATIONS)
        return shapes[0]
    if name == "SCATTER":
        base, index, value = shapes
        _known(name, options[0], SCATTERS)
        whole = scattered_shape(shapes)
        if any(n not in (1, most) for shape in (index, value) for n, most in zip(shape, whole, strict=True)):
            raise ShapeError(f"SCATTER into {base} at {index} of {value}: (o, n, k) and twice (o, m, k) are needed; 1 repeats elements")
        if not types[1].is_int or types[0] != types[2]:
            raise DTypeError(f"SCATTER of {types[2].name} into {types[0].name} at {types[1].name}: one dtype, and integers as positions")
        return base
    rows, n = shapes[0]
    if n > MOST_ROW:
        raise ShapeError(f"{name} of {shapes[0]}: rows have at most {MOST_ROW} elements")
    if name in ("SORT", "ARGSORT"):
        return shapes[0]
    k = options[0]
    if not 1 <= k <= n:
        raise ShapeError(f"TOPK of {shapes[0]} with k={k}: rows have {n} elements")
    return rows, k


def scattered_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape (o, m, k) of the values of a SCATTER, one per index."""
    base, index, value = shapes
    return base[0], max(index[1], value[1]), base[2]


def _known(name: str, option: str, options: Sequence[str]) -> None:
    if option not in options:
        raise UnsupportedError(f"{name} with {option!r}: svod knows {', '.join(options)}")


def shape_of_library_kernel(u: UOp, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of a CUSTOM_FUNCTION of the graph level, whose operands have `shapes`."""
    if is_callback(u):
        return callback_shape(u, shapes)
    name, options = u.arg
    return result_shape(name, options, shapes, [s.dtype for s in u.src])


def library_kernel_of(ast: UOp) -> UOp | None:
    """Return the CUSTOM_FUNCTION of a library kernel; None for a kernel that is a loop nest."""
    value = ast.src[0].src[1] if ast.op is Ops.SINK and len(ast.src) == 1 and ast.src[0].op is Ops.STORE else None
    return value if value is not None and value.op is Ops.CUSTOM_FUNCTION else None


def scan_accumulator(combiner: str, dtype: DType) -> DType:
    """Return the dtype in which a scan with a result of `dtype` is computed."""
    return dtype if combiner in ("MAX", "MIN") else accumulator(dtype)


# -- costs --------------------------------------------------------------------------------------------
def operations(u: UOp) -> tuple[int, int]:
    """Return (number of operations, number of transcendental functions among them) of a library kernel of the kernel level."""
    name, options, shapes = u.arg
    elements = math.prod(shapes[0])
    if name == "SCAN":
        pair = options[0] == "LOGADDEXP"
        return elements * (4 if pair else 1), elements * 2 if pair else 0
    if name == "SCATTER":
        return math.prod(scattered_shape(shapes)), 0
    if name in ("FOURIER", "TURNED_FOURIER"):
        return math.prod(shapes[0][:3]) * math.ceil(5 * math.log2(max(2, shapes[0][1 if name == "FOURIER" else 2]))), 0
    if name == "UNPAIRED":
        return elements * 12, 0
    if name == "FILTER":
        (outer, channels, _), *_, (_, n) = shapes
        pairs = outer * channels * filter_pairs(options)
        return 2 * pairs * n * math.ceil(5 * math.log2(max(2, n))), 0
    rows, n = shapes[0]
    if name in ("SORT", "ARGSORT"):
        return rows * n * merge_passes(n), 0
    k = options[0]
    return rows * (n * max(1, merge_passes(k)) + 2 * k * merge_passes(k)), 0


def merge_passes(n: int) -> int:
    """Return the number of passes of a merge sort over n elements: ⌈log2 n⌉."""
    return (n - 1).bit_length()



# -- Fourier transforms -------------------------------------------------------------------------------
def _transformed_shape(name: str, options: Options, shapes: Sequence[Shape], types: Sequence[DType]) -> Shape:
    outer, n, inner = (*shapes[0], 0, 0, 0)[:3]
    wanted: list[Shape]
    if name == "TURNED_FOURIER":
        n, inner = inner, n
        wanted = [*[(outer, inner, n)] * 2, (fourier_table_size(n),), *[(inner, n)] * 2]
    else:
        wanted = [*([(outer, n, inner, 2)] if options[1] else [(outer, n, inner)] * 2), (fourier_table_size(n),)]
    shape = outer, n, inner
    if [*shapes] != wanted or 0 in shape or len({*types}) > 1 or not types[0].is_float:
        raise ShapeError(f"{name} of {' and '.join(map(str, shapes))}: it takes floats of the shapes {' and '.join(map(str, wanted))}")
    return (*shape, 2) if options[-1] else (2, *shape)


def _filtered_shape(options: Options, shapes: Sequence[Shape], types: Sequence[DType]) -> Shape:
    before, step, results = options
    (outer, channels, size), n = (*shapes[0], 0, 0, 0)[:3], (*shapes[-1], 0, 0)[1]
    wanted = [(outer, channels, size), *[(fourier_table_size(n),)] * 2, *[(channels, n)] * 2] if n else []
    is_valid = [*shapes] == wanted and 0 not in shapes[0] and before >= 0 and 0 < step <= n and results >= 1
    if not is_valid or len({*types}) > 1 or not types[0].is_float:
        raise ShapeError(f"FILTER of {' and '.join(map(str, shapes))} with {options}: it takes floats of the shapes (o, c, m), twice that "
                         "of a table and twice (c, n), no less than 0 zeros before, a step of 1 to n, and results")
    return outer, channels, results


def _unpaired_shape(options: Options, shapes: Sequence[Shape], types: Sequence[DType]) -> Shape:
    outer, half = (*shapes[0], 0, 0)[:2]
    if [*shapes] != [*[(outer, half)] * 2, *[(half + 1,)] * 2] or 0 in shapes[0] or len({*types}) > 1 or not types[0].is_float:
        raise ShapeError(f"UNPAIRED of {' and '.join(map(str, shapes))}: it takes floats of the shapes (o, h), twice, and (h + 1,), twice")
    return (outer, half + 1, 2) if options[0] else (2, outer, half + 1)


def filter_pairs(options: Options) -> int:
    """Return the number of pairs of blocks of a row of a FILTER."""
    _, step, results = options
    return int(-(-results // (2 * step)))


def has_fourier(n: int) -> bool:
    """Return whether FOURIER transforms n positions: whether its prime factors are small."""
    for p in range(2, LARGEST_PRIME + 1):
        while n % p == 0:
            n //= p
    return n == 1


def fourier_passes(n: int) -> tuple[int, ...]:
    """Return the radices of the passes over n positions. The first is large, the others are about equal."""
    passes: list[int] = []
    while n > 1:
        if not passes:
            least, most = FIRST_RADIX
            radix = next((r for r in range(least, most + 1) if n % r == 0), 0)
        else:
            left = math.ceil(math.log(n, MOST_RADIX) - 1e-9)
            radix = next((r for r in range(math.ceil(n ** (1 / left) - 1e-9), MOST_RADIX + 1) if n % r == 0), 0)
        radix = radix or next(r for r in range(MOST_RADIX, 1, -1) if n % r == 0)
        passes.append(radix)
        n //= radix
    return tuple(passes) or (1,)


def fourier_table_size(n: int) -> int:
    """Return the number of elements of `fourier_table`, at least 1."""
    size, s = 0, 1
    for r in fourier_passes(n):
        m = n // s // r
        size, s = size + 2 * (r - 1) * m * (m > 1), s * r
    return max(1, size)


def fourier_table(n: int, inverse: bool) -> Any:
    """Return the roots of unity by which the passes over n positions turn their results, as a float64 array: the real parts, then the
    imaginary parts. A pass with more than one transform has them for each result k from 1 on, those of all transforms p together."""
    parts, s = [np.zeros(0, complex)], 1
    for r in fourier_passes(n):
        m = n // s // r
        if m > 1:
            turns = np.outer(np.arange(1, r), np.arange(m)) * s % n
            parts.append(np.exp((2j if inverse else -2j) * np.pi * turns / n).reshape(-1))
        s *= r
    roots = np.concatenate(parts)
    return np.concatenate([roots.real, roots.imag]) if roots.size else np.zeros(1)
