"""Verification of a program: whether its outputs are those that its kernel's AST defines.

The reference is the NumPy evaluator (`svod.core.spec.evaluate`), which shares no code with the lowering. Every candidate that a search
wants to keep runs on two or more sets of inputs, and every output element is compared:

    small integers      bit for bit, wherever every intermediate is representable
    random reals        within 2·E, the rounding-error bound of the accumulation dtypes plus one rounding to the output (bounds.py)
    all negative,       if the kernel takes a maximum or minimum: values of the other sign would hide a wrong identity element
    all positive
    all equal,          if the kernel has long sums: in a long chain of additions all roundings then go the same way, so that the error
                        shows whether the sum is computed in blocks

Elements are not compared where rounding decides whether they are numbers: √(a·b - c) next to 0 is NaN in one correct program and a number
in another. Their tolerance is infinite. If an output has only such elements, the program is judged neither right nor wrong.

The intervals of the inputs are chosen so that the reference stays finite, does not collapse to zeros and can be compared. Integers are
drawn inside `Param.vmin`/`vmax`, so that gathers stay inside their tables.

Where evaluating every element would cost more than `FULL_COST`, the reference is *sampled*: 1,024 points are evaluated (corners, borders
of tiles, random points), and the whole output is compared with that of a *baseline*. The baseline is the program of the heuristic's chain,
else of the kernel without opts, and has itself passed at the same points. Elements in which the two differ by more than is usual at these
points are evaluated by the reference, which decides: the tolerance of such an element may be larger, or the baseline may be wrong.

Outputs are poisoned before each run (NaN; 0xA5 bytes for integers). Every buffer lies between guard bytes of the same pattern. Inputs,
and the gaps between the parts of an output that a kernel writes, must be unchanged afterwards. All sets of inputs use the same buffers and
the same program, so scratch and temporaries that a wrong kernel forgets to write hold the previous set's values.
"""
from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.summation import SUMMING, SUMS, sum_rule
from svod.core.ir.uop import ALU, Ops, UOp
from svod.core.kernel.kernel import Kernel, own_reduces, reduce_parts
from svod.core.schedule.regions import regions_of
from svod.core.spec.evaluate import MATMUL_GAIN, evaluate, evaluate_points, store_addresses, store_extents
from svod.core.spec.values import Array, from_float, to_float
from svod.system.quantities import percent
from svod.tune.measure.bounds import error_bounds, may_be_undecidable, read_as, terms
from svod.tune.measure.measurer import Verification

GUARD = 4096                     # bytes before and after each buffer: more than any vector store reaches
POISON = 0xA5
ALIGNMENT = 64
FULL_COST = 1 << 24              # most element operations, about 0.1 s, for which the reference evaluates the whole output
POINTS = 1024                    # number of points at which a sampled reference is evaluated
ALGORITHM_POINTS = 64            # the same, where an algorithm's bounds are evaluated: each takes as long as a tile of results
CORNERS = 64                     # most corners among these points
# usual tile sizes: points are taken at these distances from both ends of an axis
BORDERS = (1, 2, 3, 4, 6, 7, 8, 12, 14, 15, 16, 31, 32, 48, 63, 64, 128, 256, 512)
INTEGER_SIZES = (8, 4, 3, 2, 1)  # candidates for the largest magnitude of integer inputs: the first that keeps all intermediates exact
REAL_RANGES = ((-1.0, 1.0), (0.1, 1.0), (0.9, 1.1), (1.1, 2.0))     # intervals to try for real inputs, in this order
EQUAL = 0.1                      # the value of all-equal inputs: not a binary fraction, so that its sums round
LONG_SUM = 1 << 12               # number of terms from which a sum counts as long
PROBE_POINTS = 64                # points at which an interval of inputs is tried
DRAWN = 1_000_003                # most elements that are drawn for one array; longer arrays repeat them
KEPT_BYTES = 256 << 20           # the inputs of all sets are kept if they have at most this many bytes
COMPARED_ELEMENTS = 1 << 15      # elements compared at a time
TINY = 1e-300                    # used as the divisor where the tolerance is 0

Run = Callable[[Sequence[Array]], None]


class InputSet(NamedTuple):
    """The distribution and the seed from which one set of inputs is drawn."""

    name: str
    kind: Literal["integers", "reals"]
    low: float
    high: float
    seed: int

    @property
    def integers(self) -> int | None:
        """The largest magnitude of the integers that are drawn; None if reals are drawn."""
        return int(max(abs(self.low), abs(self.high))) if self.kind == "integers" else None


@dataclass(frozen=True)
class Repeated:
    """An array of `size` elements that repeats `part`, without holding all elements in memory. DRAWN, the length of a long part, is prime,
    so that no two tiles or rows start at the same value."""

    part: Array
    size: int

    def whole(self) -> Array:
        """All elements as one array."""
        return self.part if self.part.size == self.size else np.resize(self.part, self.size)

    def write(self, array: Array) -> None:
        """Fill an array of `size` elements."""
        times, rest = divmod(self.size, max(1, self.part.size))
        array[:self.size - rest].reshape(times, self.part.size)[:] = self.part
        array[self.size - rest:] = self.part[:rest]

    def is_held_by(self, array: Array) -> bool:
        """Whether an array holds exactly these elements, bit for bit."""
        n = max(1, self.part.size)
        return all(_same_bytes(array[i:i + n], self.part[:self.size - i]) for i in range(0, self.size, n))

    def at(self, positions: Array) -> Array:
        """The elements at which `positions`, a mask of `size` truth values, is true."""
        return np.asarray(self.part[np.flatnonzero(positions) % self.part.size])


class Beyond(NamedTuple):
    """The elements that exceed their tolerance. `total`: their number; `worst`: the positions of at most POINTS of them, worst first."""

    total: int
    worst: Array


class Mismatch(NamedTuple):
    """The worst element of an output that exceeds its tolerance. `wrong`: the number of all such elements; `flat`: its position."""

    wrong: int
    flat: int
    got: Any
    want: Any
    tolerance: float


@dataclass(frozen=True)
class Expected:
    """The right content of one output for one set of inputs. With `flat` None, `want` and `tolerance` cover the whole output."""

    slot: int
    want: Array                   # the right values, in memory form
    tolerance: Array | None       # float64 per element, ∞ where any value is right; None: values must be equal
    flat: Array | None            # positions of the sampled points; None: the whole output

    @property
    def compared(self) -> int:
        """The number of elements that are compared."""
        return self.want.size if self.tolerance is None else int(np.count_nonzero(self.tolerance != np.inf))


# -- inputs -------------------------------------------------------------------------------------------------------------------
def _poison_bytes(dtype: DType) -> int:
    """The byte that poisons buffers of a dtype: 0xFF for floats, which gives NaN in every float type, 0xA5 for others."""
    return 0xFF if dtype.is_float else POISON


def draw(dtype: DType, size: int, inputs: InputSet, rng: np.random.Generator, vmin: int | None = None, vmax: int | None = None,
         positive: bool = False) -> Array:
    """Draw `size` values, in memory form (bfloat16 as its bits in uint16). `vmin`/`vmax` bound integers; `positive`: integers are at
    least 1 (divisors, shift amounts)."""
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(np.bool_)
    if dtype.is_float:
        if inputs.kind == "integers":
            return from_float(rng.integers(int(inputs.low), int(inputs.high) + 1, size).astype(np.float64), dtype)
        return from_float(rng.uniform(inputs.low, inputs.high, size), dtype)
    if vmin is not None or vmax is not None:
        low = vmin if vmin is not None else min(int(vmax or 0), 0)
        high = vmax if vmax is not None else max(low, 9)
    else:
        span = 7 if positive else 9
        low, high = (1 if positive else -span if dtype.kind == "i" else 0), span
        if inputs.kind == "integers":
            low, high = max(low, int(inputs.low)) if dtype.kind == "i" else low, max(1, min(high, int(abs(inputs.high)) or span))
    return rng.integers(low, max(low, high) + 1, size).astype(to_numpy(dtype))


def make_inputs(kernel: Kernel, inputs: InputSet) -> list[Repeated]:
    """The contents of each slot for a set of inputs, in memory form. They are drawn from the set's seed; outputs that the kernel does not
    read are poisoned. An integer parameter whose bits the kernel reads as floats holds the bits of floats."""
    divides = any(u.op in (Ops.IDIV, Ops.MOD, Ops.SHL, Ops.SHR) and u.dtype != dtypes.index for u in kernel.ast.toposort())
    read = {u.src[0].src[0].arg.slot for u in kernel.ast.walk(Ops.LOAD)}
    bits_of = read_as(kernel.ast)
    contents = []
    for p in kernel.params:
        rng = np.random.default_rng((inputs.seed, p.arg.slot))
        drawn = min(p.arg.size, DRAWN)
        if p.arg.slot in kernel.outs and p.arg.slot not in read:
            part = np.full(min(drawn, COMPARED_ELEMENTS) * p.dtype.itemsize, _poison_bytes(p.dtype), np.uint8).view(to_numpy(p.dtype))
        else:
            part = draw(bits_of.get(p.arg.slot, p.dtype), drawn, inputs, rng, p.arg.vmin, p.arg.vmax, divides).view(to_numpy(p.dtype))
        contents.append(Repeated(part, p.arg.size))
    return contents


def whole(values: Sequence[Repeated]) -> list[Array]:
    """The contents of each slot as one full array."""
    return [v.whole() for v in values]


def _share_worth_comparing(values: Array, tolerance: Array | None, dtype: DType) -> float:
    """The share of the elements with a finite tolerance and, for floats, a finite value other than 0."""
    worth = np.ones(values.size, np.bool_) if tolerance is None else tolerance != np.inf
    if dtype.is_float:
        x = to_float(values, dtype)
        worth &= np.isfinite(x) & (x != 0)
    return float(np.mean(worth)) if worth.size else 1.0


def _of_numbers(tolerance: Array, want: Array, dtype: DType) -> Array:
    """The tolerances with ∞ instead of NaN for elements that are numbers: a bound is NaN where infinities cancelled in it, and any result
    may then be right. A NaN tolerance of an element that is NaN stays: such an element is NaN in every correct program."""
    unknown = np.isnan(tolerance)
    if dtype.is_float:
        unknown &= ~np.isnan(to_float(want, dtype))
    return np.where(unknown, np.inf, tolerance)


class Reference:
    """The right outputs of a kernel for each set of inputs. The process that verifies makes it once per kernel and keeps it. `significand`:
    bits to which factors of float32 in sums of products may be rounded; 0: they are not rounded. `computed`: the AST whose roundings the
    program has, where an algorithm computes the same outputs otherwise; None: the kernel's. `sets`: the sets of inputs; (): they are
    chosen.

    Raises CompileError and UnsupportedError where the evaluator does: a kernel that it cannot evaluate is not verified."""

    def __init__(self, kernel: Kernel, seed: int = 0, keep: int = KEPT_BYTES, significand: int = 0, computed: UOp | None = None,
                 sets: Sequence[InputSet] = ()) -> None:
        self.kernel, self.seed, self.significand = kernel, seed, significand
        self._computed = kernel.ast if computed is None else computed
        self.ops = {u.op for u in kernel.ast.toposort() if u.dtype != dtypes.index}
        self.full = evaluation_cost(kernel) <= FULL_COST
        self._bounds: dict[int | None, list[UOp | None]] = {}
        self.sets = list(sets) or self._choose_sets()
        self._expected: dict[int, list[Expected]] = {}
        drawn = sum(min(p.arg.size, DRAWN) * p.dtype.itemsize for p in kernel.params) * len(self.sets)
        self._given: dict[int, list[Repeated]] | None = {} if drawn <= keep else None
        self.num_points = POINTS if self._computed is kernel.ast else ALGORITHM_POINTS
        self._points: list[list[Array]] = [self._sample(i, self.num_points) for i in range(len(kernel.ast.src))]

    # -- which inputs -----------------------------------------------------------------------------------------------------
    def _choose_sets(self) -> list[InputSet]:
        size = next((a for a in INTEGER_SIZES if all(b is None for b in self.bounds_of(a))), 4)
        sets = [InputSet("integers", "integers", *self._best_range("integers", [(-size, size), (1, size), (0, 1)]), self.seed + 1),
                InputSet("reals", "reals", *self._best_range("reals", list(REAL_RANGES)), self.seed + 2)]
        combiners = {u.arg[0] for u in self.kernel.ast.walk(Ops.REDUCE)}
        if combiners - {"ADD", "MUL", "AND", "OR"} and sets[0].low < 0:
            sets += [InputSet("negative integers", "integers", -size, -1, self.seed + 3),
                     InputSet("positive integers", "integers", 1, size, self.seed + 4)]
        if self._has_long_sums():
            sets.append(InputSet("equal reals", "reals", EQUAL, EQUAL, self.seed + 5))
        return sets

    def _has_long_sums(self) -> bool:
        """Whether the kernel has long sums of floats, and all of them are lowered to short chains of additions. Sums of products have
        longer chains: with equal terms their error exceeds the bound, which assumes errors of both signs."""
        sums = [u for u in self.kernel.ast.walk(Ops.REDUCE) if u.arg[0] in SUMMING and u.dtype.is_float]
        return any(terms(u) >= LONG_SUM for u in sums) and all(sum_rule(u) == SUMS for u in sums)

    def bounds_of(self, integers: int | None) -> list[UOp | None]:
        """The error bounds of the outputs for inputs that are integers of at most this magnitude; None: for real inputs."""
        if integers not in self._bounds:
            self._bounds[integers] = error_bounds(self._computed, integers, self.significand)
        return self._bounds[integers]

    def _best_range(self, kind: Literal["integers", "reals"], ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """The first interval of inputs for which nearly all reference values are finite, not zero, and can be compared; else the interval
        for which most are."""
        best, best_share = ranges[0], -1.0
        for low, high in ranges:
            probe = InputSet("probe", kind, low, high, self.seed)
            args, bounds = whole(make_inputs(self.kernel, probe)), self.bounds_of(probe.integers)
            share = 1.0
            for i, (store, bound) in enumerate(zip(self.kernel.ast.src, bounds, strict=True)):
                matters = bound if bound is not None and may_be_undecidable(bound) else None
                e = self._expected_at(i, self._sample(i, PROBE_POINTS), args, matters)
                share = min(share, _share_worth_comparing(e.want, e.tolerance, store.src[0].src[0].dtype))
            if share > best_share + 0.05:
                best, best_share = (low, high), share
            if share >= 0.95:
                break
        return best

    # -- which points -----------------------------------------------------------------------------------------------------
    def _sample(self, store: int, count: int) -> list[Array]:
        """Points of a STORE's output, as an array of coordinates per range: corners, borders of usual tile sizes, and random points."""
        extents = store_extents(self.kernel.ast, store=store)
        total = math.prod(extents)
        if total <= count:
            return [np.asarray(c) for c in np.unravel_index(np.arange(total), extents)] if extents else []
        rng = np.random.default_rng((self.seed, store))
        corners = min(CORNERS, count // 4)
        borders = (count - corners) // 2
        points = []
        for axis, n in enumerate(extents):
            near = sorted({x for b in BORDERS for x in (b - 1, b, n - b) if 0 <= x < n} | {0, n - 1})
            corner = np.where((np.arange(corners) >> axis) & 1, n - 1, 0)
            points.append(np.concatenate([corner, rng.choice(near, borders), rng.integers(0, n, count - corners - borders)]))
        return points

    # -- inputs and expected values ---------------------------------------------------------------------------------------
    def given(self, number: int) -> list[Repeated]:
        """The inputs of set `number`, by slot."""
        if self._given is None:
            return make_inputs(self.kernel, self.sets[number])
        if number not in self._given:
            self._given[number] = make_inputs(self.kernel, self.sets[number])
        return self._given[number]

    def expected(self, number: int) -> list[Expected]:
        """The right contents of the outputs for the input set `number`."""
        if number not in self._expected:
            inputs = self.sets[number]
            args = whole(self.given(number))
            bounds = self.bounds_of(inputs.integers)
            self._expected[number] = self.outputs(args, bounds) if self.full else self._sampled(args, bounds)
        return self._expected[number]

    def outputs(self, args: list[Array], bounds: Sequence[UOp | None]) -> list[Expected]:
        """The right outputs of the whole kernel for some arguments, by slot, with the tolerances by `bounds`."""
        slots = sorted(set(self.kernel.outs))
        outputs = dict(zip(slots, evaluate(self.kernel.ast, args), strict=True))
        tolerances: dict[int, Array] = {}
        for store, bound in zip(self.kernel.ast.src, bounds, strict=True):
            if bound is not None:
                slot = store.src[0].src[0].arg.slot
                room = _with_room(args, bound)
                tolerance = _of_numbers(evaluate(UOp(Ops.SINK, dtypes.void, (bound,)), room)[0], outputs[slot], store.src[1].dtype)
                tolerances[slot] = np.maximum(tolerances[slot], tolerance) if slot in tolerances else tolerance
        return [Expected(slot, outputs[slot], tolerances.get(slot), None) for slot in slots]

    def _sampled(self, args: list[Array], bounds: Sequence[UOp | None]) -> list[Expected]:
        return [self._expected_at(i, self._points[i], args, bounds[i]) for i in range(len(self.kernel.ast.src))]

    def _expected_at(self, store: int, points: list[Array], args: list[Array], bound: UOp | None) -> Expected:
        ast, tolerance = self.kernel.ast, None
        param = ast.src[store].src[0].src[0]
        want = evaluate_points(ast, args, points, store=store)
        if bound is not None:
            tolerance = evaluate_points(UOp(Ops.SINK, dtypes.void, (bound,)), _with_room(args, bound), points)
            tolerance = _of_numbers(tolerance, want, param.dtype)
        flat = store_addresses(ast, points, store=store, args=args)
        return Expected(param.arg.slot, want, tolerance, flat)

    def expected_at(self, number: int, slot: int, flat: Array) -> list[Expected]:
        """The right values at positions `flat` of an output for the input set `number`: one entry for each STORE to it, and one for the
        positions that no STORE writes."""
        args, bounds = whole(self.given(number)), self.bounds_of(self.sets[number].integers)
        stores = [i for i, store in enumerate(self.kernel.ast.src) if store.src[0].src[0].arg.slot == slot]
        found = [self._expected_at(i, self._coordinates_of(i, flat, args), args, bounds[i]) for i in stores]
        rest = np.setdiff1d(flat, np.concatenate([e.flat for e in found if e.flat is not None]))
        return [*found, Expected(slot, args[slot][rest], None, rest)]

    def _coordinates_of(self, store: int, flat: Array, args: list[Array]) -> list[Array]:
        """The coordinates at which a STORE writes the positions `flat` of its output, as an array per range."""
        ast, extents = self.kernel.ast, store_extents(self.kernel.ast, store=store)
        if not extents:
            return []
        is_wanted = np.zeros(args[ast.src[store].src[0].src[0].arg.slot].size, np.bool_)
        is_wanted[flat] = True
        chosen = []
        for start in range(0, math.prod(extents), COMPARED_ELEMENTS):
            numbers = np.arange(start, min(start + COMPARED_ELEMENTS, math.prod(extents)))
            addresses = store_addresses(ast, np.unravel_index(numbers, extents), store=store, args=args)
            chosen.append(numbers[is_wanted[addresses]])
        return list(np.unravel_index(np.concatenate(chosen), extents))


def _with_room(args: list[Array], bound: UOp) -> list[Array]:
    """A new list of `args` and, at the slot that the STORE `bound` writes, a float64 buffer."""
    param = bound.src[0].src[0].arg
    room: list[Array] = [*args]
    while len(room) < param.slot:
        room.append(np.zeros(0))
    return [*room, np.zeros(param.size)]


def evaluation_cost(kernel: Kernel) -> float:
    """Element operations that the evaluator needs for the whole output; a multiply-add of a contraction counts as 1/MATMUL_GAIN of one."""
    total = 0.0
    for stage in kernel.stages:
        outer = math.prod(kernel.axes[a].extent for a in stage.outs)
        nodes = stage.value.toposort(gate=lambda n: n.op not in (Ops.STAGE, Ops.REDUCE))
        total += outer * (1 + sum(n.op in ALU for n in nodes))
        inner = outer * math.prod(kernel.axes[a].extent for a in stage.reds)
        for reduce in own_reduces(stage.value):
            values, _ = reduce_parts(reduce)
            contraction = values[0].op is Ops.MUL and all(s.op is Ops.INDEX for s in values[0].src)
            body = [n for v in values for n in v.toposort(gate=lambda n: n.op is not Ops.STAGE) if n.op in ALU]
            total += inner / MATMUL_GAIN if contraction else inner * (1 + len(body))
    return total


# -- comparing ----------------------------------------------------------------------------------------------------------------
def _same_bytes(a: Array, b: Array) -> bool:
    """Whether two contiguous arrays of equal size hold the same bytes. Compares eight bytes at a time, in blocks that stay in the cache."""
    a, b = a.view(np.uint8), b.view(np.uint8)
    whole = a.size - a.size % 8
    wide_a, wide_b = a[:whole].view(np.uint64), b[:whole].view(np.uint64)
    return (np.array_equal(a[whole:], b[whole:])
            and all(np.array_equal(wide_a[i:i + COMPARED_ELEMENTS], wide_b[i:i + COMPARED_ELEMENTS])
                    for i in range(0, wide_a.size, COMPARED_ELEMENTS)))


def _is_near(got: Array, want: Array, tolerance: Array | float | None, dtype: DType) -> bool:
    """A test that takes a tenth of the time of `_excess`: True if all floats are certainly within `tolerance`; False says nothing. It works
    in float32 or the values' own precision, and compares with 1e-6 less than the tolerance, which is more than a difference's rounding."""
    if tolerance is None or not dtype.is_float:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.subtract(to_float(got, dtype), to_float(want, dtype))
        return bool(np.all(np.abs(apart, out=apart) <= np.multiply(tolerance, 1.0 - 1e-6)))


def _excess(got: Array, want: Array, tolerance: Array | float | None, dtype: DType) -> Array:
    """The distance of each element from `want`, as a multiple of its tolerance; 0 where it is within the tolerance. Equal elements have
    distance 0 whatever the tolerance is, as the tolerance of a NaN may itself be NaN."""
    if dtype.is_float:
        a, b = to_float(got, dtype).astype(np.float64), to_float(want, dtype).astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(a - b)
            # NaN agrees with NaN, an infinity with itself
            same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    elif dtype.kind == "b":
        # compared as bytes: any byte but 0 and 1 is wrong, even where both truth values are right
        stored = got.view(np.uint8)
        apart = np.where(stored > 1, np.inf, (stored != want.view(np.uint8)).astype(np.float64))
    else:
        apart = np.where(got == want, 0.0, np.maximum(np.abs(got.astype(np.float64) - want.astype(np.float64)), 1.0))
    limit = 0.0 if tolerance is None else tolerance
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        excess = np.nan_to_num(apart / np.maximum(limit, TINY), nan=np.inf, posinf=np.inf)
        return np.where((apart == 0.0) | (apart <= limit), 0.0, excess)


def beyond(got: Array, want: Array, tolerance: Array | float | None, dtype: DType, relative: float = 0.0) -> Beyond:
    """The elements of `got` that are further from `want` than the larger of `tolerance` (None: 0) and `relative`·|want|. `got` and `want`
    are in memory form and have the same length."""
    total, exact = 0, True
    positions, excesses = [np.zeros(0, np.int64)], [np.zeros(0)]
    for start in range(0, got.size, COMPARED_ELEMENTS):
        a, b = got[start:start + COMPARED_ELEMENTS], want[start:start + COMPARED_ELEMENTS]
        exact = exact and a.dtype == b.dtype and _same_bytes(np.ascontiguousarray(a), np.ascontiguousarray(b))
        limit = tolerance[start:start + COMPARED_ELEMENTS] if isinstance(tolerance, np.ndarray) and tolerance.ndim else tolerance
        if relative:
            size = np.abs(to_float(b, dtype).astype(np.float64))
            limit = np.maximum(0.0 if limit is None else limit, relative * np.where(np.isfinite(size), size, 0.0))
        if exact or _is_near(a, b, limit, dtype):
            continue
        excess = _excess(a, b, limit, dtype)
        bad = np.flatnonzero(excess)
        total += bad.size
        bad = bad[np.argsort(-excess[bad], kind="stable")[:POINTS]]
        positions.append(start + bad)
        excesses.append(excess[bad])
    worst = np.argsort(-np.concatenate(excesses), kind="stable")[:POINTS]
    return Beyond(total, np.concatenate(positions)[worst])


def compare(got: Array, want: Array, tolerance: Array | float | None, dtype: DType) -> Mismatch | None:
    """The worst element of `got` that is further from `want` than `tolerance` (None: 0), or None if there is none. `got` and `want` are in
    memory form and have the same length."""
    found = beyond(got, want, tolerance, dtype)
    if not found.total:
        return None
    worst = int(found.worst[0])
    limit = 0.0 if tolerance is None else tolerance
    return Mismatch(found.total, worst, got[worst], want[worst], float(np.broadcast_to(limit, got.shape)[worst]))


class GuardedBuffers:
    """A kernel's buffers, each between guards. `arrays`: one per slot, in memory form, 64-byte aligned."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self._beside = kernel, _positions_beside(kernel)
        self.arrays: list[Array] = []
        self._guards: list[tuple[Array, Array, int]] = []
        for p in kernel.params:
            size = p.arg.size * p.dtype.itemsize
            raw = np.full(size + 2 * GUARD + ALIGNMENT, _poison_bytes(p.dtype), np.uint8)
            start = GUARD + -(raw.__array_interface__["data"][0] + GUARD) % ALIGNMENT
            self.arrays.append(raw[start:start + size].view(to_numpy(p.dtype)))
            self._guards.append((raw[:start], raw[start + size:], _poison_bytes(p.dtype)))

    def fill(self, values: Sequence[Repeated]) -> None:
        for array, value in zip(self.arrays, values, strict=True):
            value.write(array)

    def for_size(self, kernel: Kernel) -> GuardedBuffers:
        """The same memory as buffers of `kernel`, which is this kernel with values for its variables."""
        buffers = copy.copy(self)
        buffers.kernel, buffers._beside = kernel, _positions_beside(kernel)
        return buffers

    def overrun(self) -> str:
        """Say in a sentence which guard bytes were written; "" if none were. After an overrun this process's memory cannot be trusted."""
        for slot, (low, high, filled) in enumerate(self._guards):
            if (low != filled).any():
                return f"bytes before buffer {slot} were written"
            if (high != filled).any():
                return f"bytes after the end of buffer {slot} were written"
        return ""

    def damage(self, before: Sequence[Repeated]) -> str:
        """Say in a sentence which forbidden write the kernel made; "" if none. `before`: the contents of the buffers before the run."""
        written = self.overrun()
        if written:
            return written
        for slot, (array, value) in enumerate(zip(self.arrays, before, strict=True)):
            if slot not in self.kernel.outs and not value.is_held_by(array):
                return f"input {slot} was changed"
        for slot in self._beside:
            at = self._beside[slot]
            if at is not None and not np.array_equal(self.arrays[slot][at].view(np.uint8), before[slot].at(at).view(np.uint8)):
                return f"output {slot} was changed between the parts that the kernel writes"
        return ""


def _positions_beside(kernel: Kernel) -> dict[int, Array | None]:
    """Output slot → a mask of the positions that the kernel does not write; None if it writes all."""
    masks: dict[int, Array | None] = {}
    regions = regions_of(kernel.ast)
    for slot in sorted(set(kernel.outs)):
        beside, region = np.ones(kernel.params[slot].arg.size, np.bool_), regions[slot]
        times = tuple(times for _, times in reversed(region.steps))
        strides = tuple(stride for stride, _ in reversed(region.steps))
        np.lib.stride_tricks.as_strided(beside[region.start:], (*times, region.run), (*strides, 1))[...] = False
        masks[slot] = beside if beside.any() else None
    return masks


@dataclass
class Baseline:
    """The outputs of a program that passed at the reference's points. `outputs`: for each set of inputs, by slot."""

    outputs: list[dict[int, Array]]


def verify(reference: Reference, run: Run, buffers: GuardedBuffers, baseline: Baseline | None = None,
           keep: Baseline | None = None, same_bits: bool = False) -> Verification:
    """Run a program on every set of inputs and compare its outputs with the reference.

    `run` is called with the guarded arrays, one per slot. Where the reference is sampled, the whole output is also compared with
    `baseline`; with `same_bits`, it always is, and has to have the same bits. The program's outputs are added to `keep`, so that it can be
    the baseline of others. If no element of an output can be compared, the program is neither right nor wrong."""
    kernel = reference.kernel
    sampled = not reference.full
    how = f"{reference.num_points} points" if sampled else "every element"
    if baseline is not None and (sampled or same_bits):
        how += " and the bits of the baseline" if same_bits else " and the whole output of the baseline"
    how += ", " + ", ".join(s.name for s in reference.sets)
    for number, inputs in enumerate(reference.sets):
        given = reference.given(number)
        buffers.fill(given)
        run(buffers.arrays)
        damage = buffers.damage(given)
        if damage:
            return Verification(False, how, f"{damage} ({inputs.name})")
        reason = _wrong(buffers, reference.expected(number), inputs)
        if not reason and same_bits and baseline is not None:
            reason = _other_bits(buffers, baseline.outputs[number], inputs)
        elif not reason and sampled and baseline is not None:
            reason = _wrong(buffers, _suspects(reference, number, buffers, baseline), inputs)
        if reason:
            return Verification(False, how, reason)
        if keep is not None:
            keep.outputs.append({slot: buffers.arrays[slot].copy() for slot in sorted(set(kernel.outs))})
    return _judged(reference, how)


def _judged(reference: Reference, how: str) -> Verification:
    """The verdict on a program that was not found wrong, and the share of its outputs that could not be compared."""
    expected = [e for number in range(len(reference.sets)) for e in reference.expected(number)]
    total, compared = sum(e.want.size for e in expected), sum(e.compared for e in expected)
    if compared < total:
        how += f" ({percent(1 - compared / total)} of the elements undecidable)"
    for slot in sorted(set(reference.kernel.outs)):
        of_slot = [e for e in expected if e.slot == slot]
        if any(e.want.size for e in of_slot) and not any(e.compared for e in of_slot):
            return Verification(None, how, f"rounding decides every element of output {slot}: none can be compared")
    return Verification(True, how)


def _wrong(buffers: GuardedBuffers, expected: Sequence[Expected], inputs: InputSet) -> str:
    """Describe the first wrong output in a sentence; "" if all are right."""
    for e in expected:
        got, dtype = buffers.arrays[e.slot], buffers.kernel.params[e.slot].dtype
        mismatch = compare(got if e.flat is None else got[e.flat], e.want, e.tolerance, dtype)
        if mismatch is not None:
            return describe(mismatch, e.slot, mismatch.flat if e.flat is None else int(e.flat[mismatch.flat]), inputs)
    return ""


def _other_bits(buffers: GuardedBuffers, baseline: dict[int, Array], inputs: InputSet) -> str:
    """Say in a sentence in which output the bits are not those of the baseline; "" if there is none. All NaNs are equal."""
    for slot, want in baseline.items():
        got, dtype = buffers.arrays[slot], buffers.kernel.params[slot].dtype
        if _same_bytes(got, want):
            continue
        differs = got.view(np.uint8).reshape(-1, got.itemsize) != want.view(np.uint8).reshape(-1, got.itemsize)
        other = differs.any(axis=1)
        if dtype.is_float:
            other &= ~(np.isnan(to_float(got, dtype)) & np.isnan(to_float(want, dtype)))
        if other.any():
            at = int(np.flatnonzero(other)[0])
            return (f"{np.count_nonzero(other)} elements of output {slot} have other bits than the baseline's with {inputs.name}, which "
                    f"`numerics=same` does not allow; the first is element {at}: {got[at]} instead of {want[at]}")
    return ""


def _suspects(reference: Reference, number: int, buffers: GuardedBuffers, baseline: Baseline) -> list[Expected]:
    """The right values of the elements that differ most from the baseline's, among those that differ by more than is usual. Two correct
    programs may differ by the sum of two error bounds. These are known at the sampled points only; for other elements the median of the
    bounds, and the median of bound over magnitude, are used. An element that is NaN or infinite in only one program may be right in both;
    so the elements in which two numbers differ are looked at separately, in case there are many NaNs and infinities."""
    suspects: list[Expected] = []
    for slot, theirs in baseline.outputs[number].items():
        mine, dtype = buffers.arrays[slot], reference.kernel.params[slot].dtype
        limit, relative = _usual_distance([e for e in reference.expected(number) if e.slot == slot], dtype)
        found = beyond(mine, theirs, limit, dtype, relative)
        places = found.worst
        if found.total > places.size and dtype.is_float:
            numbers = np.isfinite(to_float(mine, dtype)) & np.isfinite(to_float(theirs, dtype))
            places = np.union1d(places, beyond(mine, np.where(numbers, theirs, mine), limit, dtype, relative).worst)
        if found.total:
            suspects += reference.expected_at(number, slot, places)
    return suspects


def _usual_distance(expected: Sequence[Expected], dtype: DType) -> tuple[float, float]:
    """The usual largest difference between the elements of two correct programs, and the same relative to the elements' magnitudes."""
    bounds = np.concatenate([np.zeros(e.want.size) if e.tolerance is None else e.tolerance for e in expected])
    finite = np.isfinite(bounds)
    distance = 2 * float(np.median(bounds[finite])) if finite.any() else 0.0
    if not dtype.is_float:
        return distance, 0.0
    size = np.concatenate([np.abs(to_float(e.want, dtype).astype(np.float64)) for e in expected])
    known = finite & np.isfinite(size) & (size > 0)
    return distance, 2 * float(np.median(bounds[known] / size[known])) if known.any() else 0.0


def describe(m: Mismatch, slot: int, flat: int, inputs: InputSet) -> str:
    """Describe a mismatch in a sentence."""
    allowed = "exact" if m.tolerance == 0 else f"within {m.tolerance:.3g}"
    return (f"{m.wrong} elements of output {slot} are wrong with {inputs.name}; the worst is element {flat}: "
            f"{m.got} instead of {m.want} ({allowed})")
