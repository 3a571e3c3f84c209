"""The reference evaluation of a kernel AST (docs/ir.md, section 2), with NumPy and independent of the lowering.

    evaluate(ast, args)                 every element of every output
    evaluate_points(ast, args, points)  the values stored at chosen coordinates, for kernels that are too large to evaluate completely

`args` are the kernel's buffers by slot: flat arrays in memory form (`svod.core.ir.dtype.to_numpy`; bfloat16 as uint16 bits). They are never
written. With `exact` (the default, with which kernels are verified) sums and products of floats are accumulated in float64 and rounded once
to the REDUCE's dtype; without it they are accumulated in the REDUCE's dtype. Transcendental functions are rounded correctly or nearly so.
Integers wrap as in machine arithmetic; integer division by zero gives 0; a float cast to an integer type that cannot represent it gives an
unspecified value. Reading a PARAM outside its bounds raises CompileError if the gate is true. Reading a stage outside its ranges gives NaN
(0xA5 bytes for integers); a correct kernel discards that value by a WHERE.

The evaluation works on blocks of 2^18 elements, so it needs memory for the stages (`evaluate`), or about 200 MB at most
(`evaluate_points`). A sum of products each of whose factors has output ranges that the other lacks is one `numpy.matmul` per block.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from svod.core.graph.library_kernel import library_kernel_of
from svod.core.ir.combiner import Combiner, get_combiner
from svod.core.ir.dtype import DType, to_numpy
from svod.core.ir.uop import ALU, Ops, UOp
from svod.core.spec.library_kernels import reference
from svod.core.spec.values import (
    OPERATION_VALUES,
    Array,
    apply_alu,
    bitcast,
    cast,
    constant,
    from_float,
    held_dtype,
    hold,
    round_to,
    to_float,
    unhold,
)
from svod.errors import CompileError, LaunchError

__all__ = ["evaluate", "evaluate_points", "from_float", "store_addresses", "store_extents", "to_float"]

BLOCK_ELEMENTS = 1 << 18       # elements of one temporary
MATMUL_BLOCK = 1 << 22         # elements of one operand of a contraction
STAGE_BYTES = 64 << 20         # bytes of the largest stage that evaluate_points computes completely and keeps in memory
MATMUL_GAIN = 30               # a multiply-add inside numpy.matmul is about this many times cheaper than one outside


def evaluate(ast: UOp, args: Sequence[Array], variables: Mapping[str, int] | None = None, *, exact: bool = True) -> list[Array]:
    """Run the kernel once; returns the contents of every output PARAM in the order of their slots.

    Outputs start as copies of their `args`; all loads see the contents before the run. Raises LaunchError for arguments that do not fit the
    PARAMs, CompileError for an AST that reads or writes out of bounds."""
    run = _Evaluation(args, variables or {}, exact, lazy=False)
    custom = library_kernel_of(ast)
    if custom is not None:
        param = ast.src[0].src[0].src[0]
        run.buffer(param)
        with np.errstate(all="ignore"):
            held = reference(custom, [hold(run.buffer(p), p.dtype) for p in custom.src], exact)
            result = np.array(args[param.arg.slot], copy=True)
            result[:param.arg.size] = unhold(held, param.dtype)
        return [result]
    outputs: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for store in _stores(ast):
            param = store.src[0].src[0]
            run.buffer(param)
            out = outputs.setdefault(param.arg.slot, np.array(args[param.arg.slot], copy=True))
            node = run.stage(store)
            for slices, values, flat in run.grid(node):
                shape = tuple(s.stop - s.start for s in slices)
                flat = np.broadcast_to(run.checked(flat, out.size, f"STORE to {_name(param)}"), shape)
                out[flat] = unhold(np.broadcast_to(values, shape), param.dtype)
    return [outputs[slot] for slot in sorted(outputs)]


def evaluate_points(ast: UOp, args: Sequence[Array], points: Sequence[Array], variables: Mapping[str, int] | None = None, *,
                    store: int = 0, exact: bool = True) -> Array:
    """Compute the values that a STORE (the first by default) writes at `points`: one integer array of coordinates for each range of the
    STORE, all of one length. Returns an array of that length in memory form of the output's dtype. Errors as in `evaluate`."""
    run = _Evaluation(args, variables or {}, exact, lazy=True)
    root = _stores(ast)[store]
    coords = _coordinates(root, points)
    with np.errstate(all="ignore"):
        values = run.at(run.stage(root), coords)
    return np.asarray(unhold(values, root.src[0].src[0].dtype))


def store_addresses(ast: UOp, points: Sequence[Array], variables: Mapping[str, int] | None = None, *, store: int = 0,
                    args: Sequence[Array] = ()) -> Array:
    """Compute the flat positions, as int64, to which a STORE writes in its output PARAM at `points` (as in `evaluate_points`)."""
    run = _Evaluation(args, variables or {}, True, lazy=True)
    root = _stores(ast)[store]
    coords = _coordinates(root, points)
    flat = root.src[0].src[1]
    with np.errstate(all="ignore"):
        memo = run.values(_order(flat), dict(zip(root.src[2:], coords, strict=True)))
        return np.array(np.broadcast_to(memo[flat], coords[0].shape if coords else (1,)))


def store_extents(ast: UOp, variables: Mapping[str, int] | None = None, *, store: int = 0) -> tuple[int, ...]:
    """Return the extents of a STORE's ranges, from which coordinates for `evaluate_points` are drawn."""
    run = _Evaluation((), variables or {}, True, lazy=True)
    return run.stage(_stores(ast)[store]).extents


def _stores(ast: UOp) -> list[UOp]:
    stores = [ast] if ast.op is Ops.STORE else [s for s in ast.src if s.op is Ops.STORE]
    if not stores:
        raise CompileError(f"not a kernel: {ast!r} holds no STORE")
    return stores


def _coordinates(store: UOp, points: Sequence[Array]) -> list[Array]:
    ranges = store.src[2:]
    coords = [np.asarray(p, np.int64) for p in points]
    if len(coords) != len(ranges) or any(c.ndim != 1 or c.shape != coords[0].shape for c in coords):
        raise LaunchError(f"points of a STORE with {len(ranges)} ranges are {len(ranges)} vectors of one length, "
                          f"got shapes {[c.shape for c in coords]}")
    return coords


def _name(u: UOp) -> str:
    return f"PARAM {u.arg.slot}" if u.op is Ops.PARAM else repr(u)


def _order(root: UOp) -> list[UOp]:
    """List the nodes below `root` that belong to the expression of one stage, sources first: other stages and REDUCEs are leaves."""
    return [u for u in root.toposort(gate=lambda n: n.op not in (Ops.STAGE, Ops.REDUCE, Ops.RANGE)) if u.op not in (Ops.STAGE, Ops.PARAM)]


class _Stage:
    """A STAGE or STORE under evaluation: its ranges, its expression, and its contents once they are computed."""

    def __init__(self, node: UOp):
        self.dtype = node.src[0].src[0].dtype if node.op is Ops.STORE else node.dtype
        self.value = node.src[1] if node.op is Ops.STORE else node.src[0]
        self.flat = node.src[0].src[1] if node.op is Ops.STORE else None
        self.ranges = node.src[2:] if node.op is Ops.STORE else node.src[1:]
        self.extents: tuple[int, ...] = ()
        self.order = _order(self.value)
        self.flat_order = [] if self.flat is None else _order(self.flat)
        self.reduces = [u for u in self.order if u.op is Ops.REDUCE]
        self.reduce_orders = {u: [n for v in _operands(u) for n in _order(v)] for u in self.reduces}
        self.reduce_ranges = self.reduces[0].src[self.reduces[0].arg[1]:] if self.reduces else ()
        self.reduce_extents: tuple[int, ...] = ()
        if any(u.src[u.arg[1]:] != self.reduce_ranges for u in self.reduces):
            raise CompileError(f"{node!r} holds REDUCEs over different ranges: each needs a stage of its own")
        self.factors: dict[UOp, tuple[UOp, UOp]] = {}     # REDUCEs that numpy.matmul computes, with their two factors
        self.array: Array | None = None      # the contents, flat and in held form; None until they are computed
        self.points_read = 0                 # number of elements that reads have asked for so far

    @property
    def size(self) -> int:
        return math.prod(self.extents)


def _operands(reduce: UOp) -> tuple[UOp, ...]:
    return reduce.src[:reduce.arg[1]]


def _reads(expr: UOp) -> frozenset[UOp]:
    """Return the RANGEs on which an expression of one stage depends."""
    return frozenset(u for u in _order(expr) if u.op is Ops.RANGE)


def _blocks(extents: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    steps = [[slice(i, min(i + size, n)) for i in range(0, n, size)] for n, size in zip(extents, sizes, strict=True)]
    return itertools.product(*steps)


def _block_sizes(extents: Sequence[int], limit: int) -> list[int]:
    """Choose the extents of blocks of at most `limit` elements: full extent along the innermost axes, a part of one axis, 1 along the axes
    outside it."""
    sizes = [1] * len(extents)
    for i in reversed(range(len(extents))):
        sizes[i] = max(1, min(extents[i], limit // max(1, math.prod(sizes[i + 1:]))))
        if sizes[i] < extents[i]:
            break
    return sizes


def _axis(s: slice, position: int, rank: int) -> Array:
    """Return the coordinates `s` of a block along one axis as an array of `rank` axes that has extent 1 along all axes but `position`."""
    shape = [1] * rank
    shape[position] = s.stop - s.start
    return np.arange(s.start, s.stop, dtype=np.int64).reshape(shape)


class _Evaluation:
    """One evaluation of a kernel. `lazy`: only the elements of a stage that are read are computed, unless computing the complete stage
    costs less."""

    def __init__(self, args: Sequence[Array], variables: Mapping[str, int], exact: bool, lazy: bool):
        self.args, self.variables, self.exact, self.lazy = args, variables, exact, lazy
        self.stages: dict[UOp, _Stage] = {}

    # -- the parts of an AST ----------------------------------------------------------------------
    def stage(self, node: UOp) -> _Stage:
        if node not in self.stages:
            stage = _Stage(node)
            stage.extents, stage.reduce_extents = tuple(map(self.extent, stage.ranges)), tuple(map(self.extent, stage.reduce_ranges))
            stage.factors = {u: pair for u in stage.reduces if (pair := self.contraction(stage, u))}
            self.stages[node] = stage
        return self.stages[node]

    def extent(self, r: UOp) -> int:
        return int(self.values(_order(r.src[0]), {})[r.src[0]])

    def buffer(self, param: UOp) -> Array:
        slot, want = param.arg.slot, to_numpy(param.dtype)
        if slot >= len(self.args):
            raise LaunchError(f"the kernel has a PARAM {slot}, got {len(self.args)} arguments")
        array: Array = self.args[slot]
        if array.dtype != want or array.ndim != 1 or array.size < param.arg.size:
            raise LaunchError(f"PARAM {slot} is a flat array of {param.arg.size} {want} ({param.dtype.name}), "
                              f"got shape {array.shape} of {array.dtype}")
        return array

    @staticmethod
    def checked(flat: Array, size: int, what: str) -> Array:
        if flat.size and (flat.min() < 0 or flat.max() >= size):
            raise CompileError(f"{what}: positions {flat.min()} … {flat.max()} of {size} elements")
        return flat

    # -- expressions ------------------------------------------------------------------------------
    def values(self, order: Sequence[UOp], known: Mapping[UOp, Array]) -> dict[UOp, Array]:
        """Compute the values of an expression's nodes in held form. `order`: the nodes, sources first; `known`: the values of its RANGEs
        and REDUCEs."""
        memo = dict(known)
        for u in order:
            if u in memo:
                continue
            if u.op in ALU:
                memo[u] = apply_alu(u.op, u.dtype, [memo[s] for s in u.src])
            elif u.op is Ops.CONST:
                memo[u] = constant(u.dtype, u.arg)
            elif u.op is Ops.CAST:
                memo[u] = cast(memo[u.src[0]], u.src[0].dtype, u.dtype)
            elif u.op is Ops.BITCAST:
                memo[u] = bitcast(memo[u.src[0]], u.src[0].dtype, u.dtype)
            elif u.op is Ops.INDEX:
                if u.src[0].op is Ops.STAGE:
                    memo[u] = self.read(self.stage(u.src[0]), [memo[s] for s in u.src[1:]])
            elif u.op is Ops.LOAD:
                memo[u] = self.load(u, memo)
            elif u.op is Ops.DEFINE_VAR:
                name = u.arg if isinstance(u.arg, str) else u.arg[0]
                if name not in self.variables:
                    raise LaunchError(f"the kernel needs the variable {name!r}, got {sorted(self.variables)}")
                memo[u] = np.asarray(self.variables[name], np.int64)
            else:
                raise CompileError(f"{u!r} does not belong where it stands in a kernel AST")
        return memo

    def load(self, u: UOp, memo: Mapping[UOp, Array]) -> Array:
        param, flat = u.src[0].src
        buffer, where = self.buffer(param), memo[flat]
        if len(u.src) == 1:
            return hold(np.asarray(buffer.take(self.checked(where, param.arg.size, f"LOAD from {_name(param)}"))), u.dtype)
        alt, gate = memo[u.src[1]], memo[u.src[2]]
        if not gate.any():
            return np.broadcast_to(alt, np.broadcast_shapes(where.shape, gate.shape))
        where = self.checked(np.where(gate, where, np.where(gate, where, np.iinfo(np.int64).max).min()),
                             param.arg.size, f"LOAD from {_name(param)} with an open gate")
        return np.where(gate, hold(np.asarray(buffer.take(where)), u.dtype), alt)

    def read(self, stage: _Stage, coords: list[Array]) -> Array:
        """Compute INDEX(stage, coords), with `coords` broadcast against each other."""
        inside: Array | None = None
        for i, (c, n) in enumerate(zip(coords, stage.extents, strict=True)):
            if c.size and (c.min() < 0 or c.max() >= n):
                ok = (c >= 0) & (c < n)
                inside = ok if inside is None else inside & ok
                coords[i] = np.clip(c, 0, n - 1)
        if stage.size == 0:
            values = np.zeros(np.broadcast_shapes(*(c.shape for c in coords)), held_dtype(stage.dtype))
        elif self.lazy and stage.array is None and not stage.reduces:
            memo = self.values(stage.order, dict(zip(stage.ranges, coords, strict=True)))
            values = memo[stage.value]
        else:
            flat: Array = np.zeros((), np.int64)
            for c, n in zip(coords, stage.extents, strict=True):
                flat = flat * n + c
            values = self.gather(stage, flat)
        return values if inside is None else np.where(inside, values, _poison(stage.dtype))

    def gather(self, stage: _Stage, flat: Array) -> Array:
        """Return a stage's values at flattened coordinates. Computes the complete stage first, or only these elements if that is
        cheaper."""
        if stage.array is None and self.lazy:
            unique, inverse = np.unique(flat, return_inverse=True)
            stage.points_read += unique.size
            whole = stage.size / (MATMUL_GAIN if stage.factors else 1)
            if whole > stage.points_read or stage.size * held_dtype(stage.dtype).itemsize > STAGE_BYTES:
                at = np.unravel_index(unique, stage.extents) if stage.extents else ()
                return np.asarray(self.at(stage, at)[inverse].reshape(flat.shape))
        if stage.array is None:
            array = np.empty(stage.extents, held_dtype(stage.dtype))
            for slices, values, _ in self.grid(stage):
                array[slices] = values
            stage.array = array.reshape(-1)
        return np.asarray(stage.array.take(flat))

    # -- stages -----------------------------------------------------------------------------------
    def at(self, stage: _Stage, coords: Sequence[Array]) -> Array:
        """Compute a stage's values at points: one vector of coordinates for each of its ranges."""
        count = coords[0].size if coords else 1
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(stage.reduce_extents)))
        result = np.empty(count, held_dtype(stage.dtype))
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            known = {r: c[part] for r, c in zip(stage.ranges, coords, strict=True)}
            result[part] = self.block(stage, known, (part.stop - part.start,))
        return result

    def grid(self, stage: _Stage) -> Iterator[tuple[tuple[slice, ...], Array, Array]]:
        """Yield a stage's values block by block: (slice of each range, values, flat addresses if it is a STORE)."""
        if stage.size == 0:
            return
        rank = len(stage.ranges)
        whole = {u: self.contract(stage, u, *pair) for u, pair in stage.factors.items()}
        pending = [u for u in stage.reduces if u not in whole]
        limit = BLOCK_ELEMENTS // max(1, math.prod(stage.reduce_extents)) if pending else BLOCK_ELEMENTS
        for slices in _blocks(stage.extents, _block_sizes(stage.extents, max(1, limit))):
            known = {r: _axis(s, i, rank) for i, (r, s) in enumerate(zip(stage.ranges, slices, strict=True))}
            values = self.block(stage, known, tuple(s.stop - s.start for s in slices), {u: a[slices] for u, a in whole.items()})
            flat = np.zeros((), np.int64)
            if stage.flat is not None:
                flat = self.values(stage.flat_order, known)[stage.flat]
            yield slices, values, flat

    def block(self, stage: _Stage, known: Mapping[UOp, Array], shape: tuple[int, ...], done: Mapping[UOp, Array] | None = None) -> Array:
        """Compute a stage's values for one block. `known`: the values of its ranges, which broadcast to `shape`; `done`: the values of
        REDUCEs that are already computed."""
        known = dict(known)
        for u in stage.reduces:
            parts = [done[u]] if done and u in done else self.reduce(stage, u, known, shape)
            known[u] = parts[0]
            for g in stage.order:
                if g.op is Ops.GEP and g.src[0] is u:
                    known[g] = parts[g.arg]
        return np.broadcast_to(self.values(stage.order, known)[stage.value], shape)

    def reduce(self, stage: _Stage, u: UOp, known: Mapping[UOp, Array], shape: tuple[int, ...]) -> list[Array]:
        """Compute one REDUCE over all its ranges, block by block; returns its components, each of `shape`."""
        combiner, operands, rank = get_combiner(u.arg[0]), _operands(u), len(stage.reduce_ranges)
        wide = self.exact and u.dtype.is_float and u.arg[0] in ("ADD", "MUL")
        total: list[Array] = [np.full(shape, v, np.float64 if wide else held_dtype(o.dtype))
                              for v, o in zip(combiner.identity(*(o.dtype for o in operands)), operands, strict=True)]
        outer = {r: v.reshape(v.shape + (1,) * rank) for r, v in known.items() if r.op is Ops.RANGE}
        limit = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape)))
        for slices in _blocks(stage.reduce_extents, _block_sizes(stage.reduce_extents, limit)):
            inner = {r: _axis(s, i, rank) for i, (r, s) in enumerate(zip(stage.reduce_ranges, slices, strict=True))}
            memo = self.values(stage.reduce_orders[u], outer | inner)
            full = shape + tuple(s.stop - s.start for s in slices)
            part = reduce_axes(combiner, [np.broadcast_to(memo[o], full) for o in operands], tuple(range(len(shape), len(full))), wide)
            total = list(combiner.combine(tuple(total), tuple(part), _alu, nan=u.dtype.is_float))
        return [round_to(t, o.dtype) if o.dtype.is_float else t for t, o in zip(total, operands, strict=True)]

    # -- contractions -----------------------------------------------------------------------------
    def contraction(self, stage: _Stage, u: UOp) -> tuple[UOp, UOp] | None:
        """Return the two factors of a REDUCE that `numpy.matmul` can compute: a sum of products whose factors both depend on all reduced
        ranges, and each on an output range on which the other does not. None for any other REDUCE."""
        product = u.src[0]
        if u.arg != ("ADD", 1) or product.op is not Ops.MUL or not (self.exact or u.dtype.bits >= 32):
            return None
        a, b = product.src
        reads_a, reads_b, summed = _reads(a), _reads(b), frozenset(stage.reduce_ranges)
        outputs = frozenset(stage.ranges)
        if summed <= reads_a and summed <= reads_b and reads_a & outputs - reads_b and reads_b & outputs - reads_a:
            return a, b
        return None

    def contract(self, stage: _Stage, u: UOp, a: UOp, b: UOp) -> Array:
        """Compute a sum of products of the factors a and b with `numpy.matmul`, block by block, each factor only over the ranges on which
        it depends. Returns an array of shape `stage.extents`."""
        wide = np.dtype(np.float64) if u.dtype.is_float and self.exact else held_dtype(u.dtype)
        reads_a, reads_b, orders = _reads(a), _reads(b), {a: _order(a), b: _order(b)}
        axes = (*stage.ranges, *stage.reduce_ranges)
        extents = (*stage.extents, *stage.reduce_extents)
        sizes = _contraction_blocks(axes, extents, (reads_a, reads_b, frozenset(stage.ranges)))
        total = np.zeros(stage.extents, wide)
        outs = frozenset(stage.ranges)
        batch = [r for r in stage.ranges if r in reads_a and r in reads_b]
        rows = [r for r in stage.ranges if r in reads_a and r not in reads_b]
        columns = [r for r in stage.ranges if r in reads_b and r not in reads_a]
        for slices in _blocks(extents, sizes):
            at = dict(zip(axes, slices, strict=True))
            size = {r: s.stop - s.start for r, s in at.items()}

            def operand(x: UOp, order: list[UOp], at: dict[UOp, slice] = at, size: dict[UOp, int] = size) -> Array:
                known = {r: _axis(at[r], i, len(order)) for i, r in enumerate(order)}
                return np.broadcast_to(self.values(orders[x], known)[x], tuple(size[r] for r in order)).astype(wide)

            def count(which: Sequence[UOp], size: dict[UOp, int] = size) -> int:
                return math.prod(size[r] for r in which)

            summed = count(stage.reduce_ranges)
            left = operand(a, [*batch, *rows, *stage.reduce_ranges]).reshape(count(batch), count(rows), summed)
            right = operand(b, [*batch, *stage.reduce_ranges, *columns]).reshape(count(batch), summed, count(columns))
            order = [*batch, *rows, *columns]
            order += [r for r in stage.ranges if r not in order]        # an output range that neither factor reads
            part = np.matmul(left, right).reshape([size[r] if r in reads_a | reads_b else 1 for r in order])
            total[slices[:len(outs)]] += part.transpose([order.index(r) for r in stage.ranges])
        return round_to(total, u.dtype) if u.dtype.is_float else total


def _contraction_blocks(axes: Sequence[UOp], extents: Sequence[int], arrays: Sequence[frozenset[UOp]]) -> list[int]:
    """Choose the extents of blocks so that no array in `arrays`, each given by its axes, has more than MATMUL_BLOCK elements: the longest
    extent is halved until that holds."""
    sizes = list(extents)
    while max(math.prod(n for r, n in zip(axes, sizes, strict=True) if r in which) for which in arrays) > MATMUL_BLOCK:
        i = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[i] = -(-sizes[i] // 2)
    return sizes


def _alu(op: Ops, *args: Array) -> Array:
    """The `alu` for `Combiner.combine`. The result has the NumPy type of the operands, so float64 accumulators stay float64."""
    return np.asarray(OPERATION_VALUES[op](*args))


def reduce_axes(combiner: Combiner, operands: list[Array], axes: tuple[int, ...], wide: bool) -> list[Array]:
    """Reduce one non-empty block over `axes`; returns the components. `wide`: whether sums and products are accumulated in float64."""
    x = operands[0]
    if combiner.name in ("ADD", "MUL"):
        function = np.sum if combiner.name == "ADD" else np.prod
        return [np.asarray(function(x, axis=axes, dtype=np.float64 if wide else x.dtype))]
    if combiner.components == 1:
        ufunc = {Ops.MAX: np.maximum, Ops.MIN: np.minimum, Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or}[combiner.op]
        return [np.asarray(ufunc.reduce(x, axis=axes))]
    if combiner.components == 3:
        top = np.max(x, axis=axes, keepdims=True)
        scale = np.where(x == top, 1.0, np.exp(x.astype(np.float64) - top))
        return [top.reshape(tuple(n for i, n in enumerate(x.shape) if i not in axes)), *((scale * y).sum(axis=axes) for y in operands[1:])]
    extreme = (np.max if combiner.op is Ops.MAX else np.min)(x, axis=axes, keepdims=True)
    hit = (x == extreme) | ((x != x) & (extreme != extreme))
    index = np.where(hit, operands[1], np.iinfo(operands[1].dtype).max).min(axis=axes)
    return [extreme.reshape(index.shape), np.asarray(index)]


def _poison(dtype: DType) -> Array:
    if dtype.is_float:
        return constant(dtype, math.nan)
    return constant(dtype, int.from_bytes(b"\xa5" * dtype.itemsize, "little"))
