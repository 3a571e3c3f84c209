"""The reference evaluation of a kernel AST (docs/ir.md, section 2), with NumPy and independent of the lowering.

    evaluate(ast, args)                 every element of every output
    evaluate_points(ast, args, points)  the values stored at chosen coordinates, for kernels too large to evaluate whole

`args` are the kernel's buffers by slot: flat arrays in memory form (`svod.core.ir.dtype.to_numpy`; bfloat16 as uint16 bits). They are never
written. With `exact` (the default: the oracle of verification) sums and products of floats are accumulated in float64 and rounded once to
the REDUCE's dtype, transcendental functions are rounded correctly or nearly so; without it sums are accumulated in the REDUCE's dtype.
Integers wrap like the machine's; integer division by zero gives 0; a float cast to an integer that cannot hold it gives an unspecified
value. Reading a PARAM outside its bounds with an open gate raises CompileError; a stage read outside its ranges gives NaN (or 0xA5 bytes),
which a WHERE around it has to hide.

Work is cut into blocks of 2^18 elements, so memory is the stages (`evaluate`) or at most about 200 MB (`evaluate_points`). A float or
integer sum of products whose operands have ranges of their own is one `numpy.matmul` per block.
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
STAGE_BYTES = 64 << 20         # evaluate_points keeps a whole stage in memory up to here
MATMUL_GAIN = 30               # a multiply-add inside matmul costs about this much less than one done by blocks


def evaluate(ast: UOp, args: Sequence[Array], variables: Mapping[str, int] | None = None, *, exact: bool = True) -> list[Array]:
    """The contents of every output PARAM after the kernel ran once, in the order of their slots.

    Outputs start as copies of their `args`; all loads see the contents before the kernel. Raises LaunchError for arguments that do not
    fit the PARAMs, CompileError for an AST that reads or writes out of bounds."""
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
    """The values a STORE (the first by default) writes at `points`: one integer array of coordinates per range of the STORE, all
    of one length. Returns an array of that length in memory form of the output's dtype. Errors as in `evaluate`."""
    run = _Evaluation(args, variables or {}, exact, lazy=True)
    root = _stores(ast)[store]
    coords = _coordinates(root, points)
    with np.errstate(all="ignore"):
        values = run.at(run.stage(root), coords)
    return np.asarray(unhold(values, root.src[0].src[0].dtype))


def store_addresses(ast: UOp, points: Sequence[Array], variables: Mapping[str, int] | None = None, *, store: int = 0,
                    args: Sequence[Array] = ()) -> Array:
    """The flat positions in its output PARAM that a STORE writes at `points` (as in `evaluate_points`); int64."""
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
    """The nodes of one stage's expression below `root`, sources first: other stages and reductions are leaves."""
    return [u for u in root.toposort(gate=lambda n: n.op not in (Ops.STAGE, Ops.REDUCE, Ops.RANGE)) if u.op not in (Ops.STAGE, Ops.PARAM)]


class _Stage:
    """The parts of a STAGE or STORE: its ranges, its expression, and its contents once they are known."""

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
        self.factors: dict[UOp, tuple[UOp, UOp]] = {}     # REDUCEs that are contractions
        self.array: Array | None = None      # flat, held form
        self.points_read = 0

    @property
    def size(self) -> int:
        return math.prod(self.extents)


def _operands(reduce: UOp) -> tuple[UOp, ...]:
    return reduce.src[:reduce.arg[1]]


def _reads(expr: UOp) -> frozenset[UOp]:
    """The RANGEs an expression of one stage depends on."""
    return frozenset(u for u in _order(expr) if u.op is Ops.RANGE)


def _blocks(extents: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    steps = [[slice(i, min(i + size, n)) for i in range(0, n, size)] for n, size in zip(extents, sizes, strict=True)]
    return itertools.product(*steps)


def _block_sizes(extents: Sequence[int], limit: int) -> list[int]:
    """Extents of blocks of at most `limit` elements: whole inner axes, one cut axis, single positions outside it."""
    sizes = [1] * len(extents)
    for i in reversed(range(len(extents))):
        sizes[i] = max(1, min(extents[i], limit // max(1, math.prod(sizes[i + 1:]))))
        if sizes[i] < extents[i]:
            break
    return sizes


def _axis(s: slice, position: int, rank: int) -> Array:
    """The coordinates of one axis of a block, shaped to broadcast along `position` of `rank` axes."""
    shape = [1] * rank
    shape[position] = s.stop - s.start
    return np.arange(s.start, s.stop, dtype=np.int64).reshape(shape)


class _Evaluation:
    """One evaluation. `lazy`: stages are computed where they are read, unless the whole costs less."""

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
        """The values, in held form, of the nodes of an expression; `known` holds those of its RANGEs and REDUCEs."""
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
        """INDEX(stage, coords): `coords` are broadcast together."""
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
        """A stage's values at flattened coordinates, computing the stage first, as a whole or only there."""
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
        """A stage's values at vectors of coordinates."""
        count = coords[0].size if coords else 1
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(stage.reduce_extents)))
        result = np.empty(count, held_dtype(stage.dtype))
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            known = {r: c[part] for r, c in zip(stage.ranges, coords, strict=True)}
            result[part] = self.block(stage, known, (part.stop - part.start,))
        return result

    def grid(self, stage: _Stage) -> Iterator[tuple[tuple[slice, ...], Array, Array]]:
        """A stage's values block by block over all its ranges: (slices, values, flat address if it is a STORE)."""
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
        """A stage's values where its ranges have the values in `known`, which broadcast to `shape`; `done`: finished REDUCEs."""
        known = dict(known)
        for u in stage.reduces:
            parts = [done[u]] if done and u in done else self.reduce(stage, u, known, shape)
            known[u] = parts[0]
            for g in stage.order:
                if g.op is Ops.GEP and g.src[0] is u:
                    known[g] = parts[g.arg]
        return np.broadcast_to(self.values(stage.order, known)[stage.value], shape)

    def reduce(self, stage: _Stage, u: UOp, known: Mapping[UOp, Array], shape: tuple[int, ...]) -> list[Array]:
        """The components of one REDUCE, each of `shape`, over all of its ranges, block by block."""
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
        """The factors of REDUCE(ADD) of a MUL if each has output ranges that the other lacks and both have all reduce ranges."""
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
        """The whole of a contraction, of shape `stage.extents`: both factors on their own grids, then matmul, by blocks."""
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
    """Extents of blocks of which no array, each given by its axes, has more than MATMUL_BLOCK elements: the longest are halved."""
    sizes = list(extents)
    while max(math.prod(n for r, n in zip(axes, sizes, strict=True) if r in which) for which in arrays) > MATMUL_BLOCK:
        i = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[i] = -(-sizes[i] // 2)
    return sizes


def _alu(op: Ops, *args: Array) -> Array:
    """The `alu` combiners are applied with: operands that are accumulators keep their own NumPy type, wider or not."""
    return np.asarray(OPERATION_VALUES[op](*args))


def reduce_axes(combiner: Combiner, operands: list[Array], axes: tuple[int, ...], wide: bool) -> list[Array]:
    """One block of a reduction over the given axes; a block is never empty."""
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
