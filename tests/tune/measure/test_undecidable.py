"""Where rounding decides whether a value is a number, no right program is wrong, and a wrong one still is.

Right programs are the evaluator's: with products and sums fused or not, sums of float32 in another order, and functions that are an ulp off.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import COMPARISONS, TRANSCENDENTAL, Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.spec import evaluate as evaluator
from svod.core.spec.values import apply_alu
from svod.tune.measure.verify import GuardedBuffers, Reference, verify
from tests.tune.search_kernels import axis, kernel, load, param, read, reduce, stage, store

Array = np.ndarray[Any, Any]
Run = Callable[[Sequence[Array]], None]
SIZE, DEPTH = 499, 7
ROUNDED = TRANSCENDENTAL | {Ops.SQRT, Ops.RECIPROCAL, Ops.FDIV}
F32 = dtypes.float32


# -- right programs -----------------------------------------------------------------------------------------------------------
def contracted(ast: UOp) -> UOp:
    """The AST with x·y ± c as one operation."""
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        new = u.replace(src=tuple(done[s] for s in u.src))
        if u.op in (Ops.ADD, Ops.SUB) and u.dtype == F32:
            a, b = new.src
            if a.op is Ops.MUL:
                new = UOp(Ops.MULACC, F32, (*a.src, b if u.op is Ops.ADD else b.alu(Ops.NEG)))
            elif b.op is Ops.MUL:
                x, y = b.src
                new = UOp(Ops.MULACC, F32, (x if u.op is Ops.ADD else x.alu(Ops.NEG), y, a))
        done[u] = new
    return done[ast]


def separate(ast: UOp) -> UOp:
    """The AST with a product and a sum in place of each MULACC."""
    done: dict[UOp, UOp] = {}
    for u in ast.toposort():
        src = tuple(done[s] for s in u.src)
        done[u] = src[0] * src[1] + src[2] if u.op is Ops.MULACC else u.replace(src=src)
    return done[ast]


def off_by_an_ulp(op: Ops, dtype: DType, args: Sequence[Array]) -> Array:
    """An operation whose rounded results are next to the nearest number, above or below as their bits say."""
    exact = apply_alu(op, dtype, args)
    if op not in ROUNDED or dtype != F32:
        return exact
    exact = np.ascontiguousarray(exact)
    up = exact.view(np.uint32) * np.uint32(2654435761) >> np.uint32(31) == 1
    return np.where(np.isfinite(exact) & (exact != 0), np.nextafter(exact, np.where(up, np.inf, -np.inf).astype(np.float32)), exact)


def program(k: Kernel, ast: UOp, function: Callable[[Ops, DType, Sequence[Array]], Array] = apply_alu) -> Run:
    def run(arrays: Sequence[Array]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluator, "apply_alu", function)
            results = evaluator.evaluate(ast, arrays, exact=False)
        for slot, values in zip(sorted(set(k.outs)), results, strict=True):
            arrays[slot][:] = values
    return run


def right_programs(k: Kernel) -> list[Run]:
    return [program(k, contracted(k.ast)), program(k, separate(k.ast)), program(k, contracted(k.ast), off_by_an_ulp),
            program(k, separate(k.ast), off_by_an_ulp)]


# -- random kernels -----------------------------------------------------------------------------------------------------------
def random_kernel(rng: random.Random) -> Kernel:
    """A kernel of elements with sums of products, differences, and functions whose domains have borders."""
    i = axis(0, SIZE)
    leaves = [load(param(slot, SIZE), i) for slot in (1, 2, 3)]
    p, q, r = axis(1, SIZE), axis(2, DEPTH), axis(3, DEPTH)
    products = stage(load(param(4, SIZE * DEPTH), p * DEPTH + q) * load(param(5, SIZE * DEPTH), p * DEPTH + q), p, q)
    if rng.random() < 0.4:
        leaves.append(reduce(read(products, i, r), "ADD", r))

    def value(depth: int) -> UOp:
        if depth == 0 or rng.random() < 0.1:
            return rng.choice(leaves) if rng.random() < 0.9 else UOp.const(F32, rng.choice((0.5, 1.0, 2.0, 0.1)))
        kind = rng.choice(("difference", "difference", "fused", "function", "function", "quotient", "product", "power", "where", "step",
                           "clamp", "remainder"))
        a, b = value(depth - 1), value(depth - 1)
        if kind == "difference":
            return a * value(0) - b
        if kind == "fused":
            return UOp(Ops.MULACC, F32, (a, value(0), b.alu(Ops.NEG)))
        if kind == "function":
            return a.alu(rng.choice((Ops.SQRT, Ops.SQRT, Ops.LOG, Ops.LOG2, Ops.RECIPROCAL, Ops.EXP, Ops.SIN, Ops.ABS)))
        if kind == "quotient":
            return a.alu(Ops.FDIV, b)
        if kind == "product":
            return a * b
        if kind == "power":
            return a.alu(Ops.POW, b if rng.random() < 0.3 else UOp.const(F32, rng.choice((2.0, 3.0, 0.5, -1.5))))
        if kind == "where":
            other = rng.choice((value(depth - 1), UOp.const(F32, float("nan")), UOp.const(F32, 0.0), UOp.const(F32, float("-inf"))))
            limit = rng.choice((value(0), UOp.const(F32, 0.0), UOp.const(F32, 1.0)))
            return a.alu(rng.choice(sorted(COMPARISONS, key=lambda op: op.value)), limit).alu(Ops.WHERE, b, other)
        if kind == "step":
            return a - b.alu(rng.choice((Ops.FLOOR, Ops.TRUNC, Ops.ROUND))) * value(0)
        if kind == "remainder":
            return a.alu(Ops.MOD, UOp.const(F32, rng.choice((0.25, 1.0)))) if rng.random() < 0.5 else a.cast(dtypes.float16).cast(F32)
        return a.alu(Ops.MIN, 1.0).alu(Ops.MAX, rng.choice((-1.0, 0.0, 0.001)))
    root = value(rng.randint(2, 4)).alu(rng.choice((Ops.SQRT, Ops.LOG, Ops.NEG, Ops.RECIPROCAL)))
    used = sorted(root.walk(Ops.PARAM), key=lambda u: u.arg.slot)
    root = root.substitute({u: param(at, u.arg.size) for at, u in enumerate(used, 1)})
    return kernel(store(param(0, SIZE), i, root, i))


# -- wrong programs -----------------------------------------------------------------------------------------------------------
def with_wrong_index(k: Kernel) -> UOp:
    """The AST that reads the neighbours of one input's elements."""
    first = min((u for u in k.ast.walk(Ops.LOAD)), key=lambda u: u.src[0].src[0].arg.slot)
    p, flat = first.src[0].src
    return k.ast.substitute({first: load(p, (flat + 1) % p.arg.size)})


def with_wrong_last_element(k: Kernel) -> UOp:
    """The AST whose last element is that of the one before it, in one input."""
    first = min((u for u in k.ast.walk(Ops.LOAD)), key=lambda u: u.src[0].src[0].arg.slot)
    p, flat = first.src[0].src
    return k.ast.substitute({first: load(p, flat.alu(Ops.MIN, p.arg.size - 2))})
