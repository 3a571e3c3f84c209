"""ROUND: rounds both factors of a sum of products of float32 to bfloat16; the sum stays float32.

    y[m, n] = Σ k of x[m, k] · w[n, k]              X[m, k] = f32(bf16(x[m, k]));   W[n, k] = f32(bf16(w[n, k]))
                                                    y[m, n] = Σ k of X[m, k] · W[n, k]

A factor that is read with a stride, x[c, 2*y + i], becomes X[c, y, i], so that its reads go position by position, as instructions want
them.

The factors become stages of their own, which are conversions from bfloat16: the form of a product of bfloat16, which TC and its sketches
take. A copy that STAGE makes holds bfloat16, and one of constants is made once. A factor that is elementwise is computed in the new stage;
the results of a reduction are read from theirs. Products of two bfloat16 numbers are exact in float32.
"""
from __future__ import annotations

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.algorithms.extension import Ranges
from svod.core.kernel.contraction import summed_product
from svod.core.kernel.kernel import Kernel, own_reduces
from svod.errors import KernelOptError

ROUNDED_TO = {"bfloat16": dtypes.bfloat16}      # the types that factors may be rounded to


def rounded(kernel: Kernel, name: str, to: str) -> Kernel:
    """Rewrite a kernel: stage `name` sums products of factors that are rounded to the type `to`. Raises KernelOptError with the reason."""
    return kernel.rewritten("ROUND", name, to, lambda: _rewrite(kernel, name, ROUNDED_TO[to]))


def can_round(kernel: Kernel, name: str) -> bool:
    """Whether a stage sums products of float32 that are not rounded yet."""
    try:
        _factors(kernel.stage_named(name).value)
    except KernelOptError:
        return False
    return True


def _factors(value: UOp) -> tuple[UOp, tuple[UOp, UOp]]:
    """The sum in a stage's value, and the reads of its two factors, which rounding changes."""
    reduce, reads = summed_product(value)
    if all(_is_narrow(f.src[0].src[0]) for f in reads):
        raise KernelOptError("its factors are conversions of narrower numbers, which rounding would not change or only make worse")
    return reduce, reads


def _is_narrow(value: UOp) -> bool:
    return value.op is Ops.CAST and value.src[0].dtype.itemsize < dtypes.float32.itemsize


def _rewrite(kernel: Kernel, name: str, to: DType) -> UOp:
    node = kernel.stage_named(name).node
    reduce, reads = _factors(node.src[1] if node.op is Ops.STORE else node.src[0])
    ranges = Ranges(kernel.ast)
    product = reduce.src[0].replace(src=tuple([_rounded_read(ranges, f, to) for f in reads]))
    summed = reduce.replace(src=(product, *reduce.src[1:]))
    return kernel.ast.substitute({node: node.substitute({reduce: summed})})


def _rounded_read(ranges: Ranges, read: UOp, to: DType) -> UOp:
    """The read of a stage of its own that has the values of the stage that `read` reads, rounded."""
    stage = read.src[0]
    if stage.src[0].op is Ops.CAST and stage.src[0].src[0].dtype == to:
        return read
    own, coords, dims = list[UOp](), list[UOp](), list[UOp]()       # the new stage's RANGEs, its reads, and the dims of the old one
    for dim, (e, r) in enumerate(zip(read.src[1:], stage.src[1:], strict=True)):
        parts = _strided(read.src[1:], dim)
        if not parts:
            own.append(ranges.like(r)[0])
            coords.append(e)
            dims.append(own[-1])
            continue
        fresh = ranges.like(*parts)
        own += fresh
        coords += parts
        dims.append(e.substitute(dict(zip(parts, fresh, strict=True))))
    value = UOp(Ops.INDEX, stage.dtype, (stage, *dims)) if own_reduces(stage.src[0]) \
        else stage.src[0].substitute(dict(zip(stage.src[1:], dims, strict=True)))
    wide = UOp(Ops.CAST, dtypes.float32, (UOp(Ops.CAST, to, (value,)),))
    return UOp(Ops.INDEX, read.dtype, (UOp(Ops.STAGE, dtypes.float32, (wide, *own)), *coords))


def _strided(coords: tuple[UOp, ...], dim: int) -> list[UOp]:
    """The RANGEs that a dim is read by with a stride, which become dims of their own: of windows only those along the last strided dim, as
    neighbouring windows share elements. [] for other dims."""
    found = [_parts(e) for e in coords]
    last = max([i for i, parts in enumerate(found) if len(parts) > 1], default=-1)
    return found[dim] if len(found[dim]) == 1 or dim == last else []


def _parts(e: UOp) -> list[UOp]:
    """The RANGEs of a sum of RANGEs, each times a factor, and a constant, if a factor is not 1; else []."""
    terms, _ = sy.linear(e)
    is_plain = all(r.op is Ops.RANGE and not sy.is_symbolic(r) for r in terms)
    return list(terms) if is_plain and any(c > 1 for c in terms.values()) and all(c > 0 for c in terms.values()) else []
