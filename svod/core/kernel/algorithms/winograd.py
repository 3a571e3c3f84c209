"""WINOGRAD: computes windows of a sum of products with fewer multiplications, m neighbouring outputs at a time.

    y[o, t·m + p] = Σ c, i of x[c, t·m + p + i] · w[o, c, i]        p < m, i < r

becomes, with a for the m + r - 1 points at which the polynomials of m outputs and r taps are multiplied,

    U[a, o, c] = Σ i of G[a, i] · w[o, c, i]                V[a, c, t] = Σ u of B[a, u] · x[c, t·m + u]
    M[a, o, t] = Σ c of U[a, o, c] · V[a, c, t]             y[o, t·m + p] = Σ a of A[p, a] · M[a, o, t]

Windows along two axes are transformed along one after the other. The sums with A, B and G have few terms, with constant factors, and are
written out: a stage whose last ranges select the row of a matrix has the value of each row, and its reads choose one. M is a product of
matrices for each point, which the other opts tile and stage as any other; U reads only constants of the plan and is computed once.

Where groups have shared memory, the products read U and V by way of stages that copy them. U and V may then be phases, and blocks of them
lie in shared memory, as of any operand that is an argument.

The output keeps its axes: position x reads row x % m of A times the products of tile x // m. A chain pads x to whole tiles (PADTO) and
makes the positions of a tile straight-line code (UPCAST), so that x % m is a constant and x // m the tile. The last tile may reach beyond
the data: its loads are gated.

After S. Winograd, "Arithmetic complexity of computations" (1980), and A. Lavin and S. Gray, arXiv:1509.09308; the points are those of least
error among small fractions (B. Barabasz et al., arXiv:1803.10986).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import NamedTuple

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.algorithms.extension import Extension, Ranges
from svod.core.kernel.contraction import summed_product
from svod.core.kernel.kernel import Kernel
from svod.errors import KernelOptError

Row = tuple[Fraction, ...]
ONE_HALF = Fraction(1, 2)
TILE_OUTPUTS = (4, 2)       # outputs of a tile along each window, that a heuristic tries
MOST_GROWTH = 128       # largest `growth` of an algorithm: of 4×4 results of 3×3 taps it is 97, of 6×6 509
TRANSFORM = 10          # multiply-adds that take as long as an element of a transform, with its load and its store
MOST_OPERATIONS = 0.8   # share of the operations above which tiles certainly do not pay
# finite points, in the order in which they are used; the last point is infinity
FINITE_POINTS = (Fraction(0), Fraction(1), Fraction(-1), ONE_HALF, Fraction(-2), -ONE_HALF, Fraction(2))


@cache
def tap_rows(m: int, r: int) -> tuple[Row, ...]:
    """G: for m outputs and r taps, the m + r - 1 rows by which the taps are multiplied. Exact."""
    points = FINITE_POINTS[:m + r - 2]
    scales = [prod([p - q for q in points if q != p], start=Fraction(1)) for p in points]
    return (*[tuple([p ** j / s for j in range(r)]) for p, s in zip(points, scales, strict=True)],
            tuple([Fraction(int(j == r - 1)) for j in range(r)]))


@cache
def growth(m: int, r: int) -> float:
    """The bound of the error of m outputs of r taps, in units of that of the plain sums for data and taps of one magnitude: the sum of the
    magnitudes that the products of a tile reach, over that of the products of a window. Of several windows it is the product."""
    n = m + r - 1
    points = FINITE_POINTS[:n - 1]
    roots = [*[[q for q in points if q != p] for p in points], points]
    reached = [_magnitude(_with_roots(own, n)) * _magnitude(row) for own, row in zip(roots, tap_rows(m, r), strict=True)]
    outputs = [[*[p ** i for p in points], Fraction(int(i == m - 1))] for i in range(m)]
    return float(max([_magnitude([a * x for a, x in zip(row, reached, strict=True)]) for row in outputs]) / r)


def _magnitude(row: Iterable[Fraction]) -> Fraction:
    return sum([abs(x) for x in row], start=Fraction(0))


def data_rows(values: Sequence[UOp]) -> list[UOp]:
    """The rows of B times a vector of n values: for a point p, the coefficients of Π (x - q) over the other points q; for infinity, those
    of the product over all. The rows of two points p, q are sums of two parts that both share: with C the product over the others,
    x·C - q·C and x·C - p·C."""
    n = len(values)
    points = FINITE_POINTS[:n - 1]
    rows: dict[Fraction, UOp] = {}
    for p, q in zip(points[1::2], points[2::2], strict=False):
        common = _with_roots([o for o in points if o not in (p, q)], n)
        low, high = _combined(common, values), _combined((Fraction(0), *common[:-1]), values)
        rows[p], rows[q] = _combined((Fraction(1), -q), (high, low)), _combined((Fraction(1), -p), (high, low))
    return [*[rows[p] if p in rows else _combined(_with_roots([q for q in points if q != p], n), values) for p in points],
            _combined(_with_roots(points, n), values)]


def output_rows(m: int, values: Sequence[UOp]) -> list[UOp]:
    """The m rows of A times a vector: the i-th is Σ p^i · value of point p; the last has the value of infinity as well. The values of p and
    -p are added for even i, and subtracted for odd i, once for all rows."""
    points = FINITE_POINTS[:len(values) - 1]
    of, terms = dict(zip(points, values, strict=False)), list[tuple[Fraction, UOp, UOp]]()
    for p in points:
        if p and -p in of:
            if p > 0:
                even, odd = (UOp(op, of[p].dtype, (of[p], of[-p])) for op in (Ops.ADD, Ops.SUB))
                terms.append((p, even, odd))
        else:
            terms.append((p, of[p], of[p]))
    rows = []
    for i in range(m):
        last = ((Fraction(1), values[-1]),) if i == m - 1 else ()
        factors, parts = zip(*[(p ** i, odd if i % 2 else even) for p, even, odd in terms], *last, strict=True)
        rows.append(_combined(factors, parts))
    return rows


def _with_roots(roots: Sequence[Fraction], n: int) -> Row:
    """The n coefficients of Π (x - root), from the constant up."""
    row = [Fraction(1)] + [Fraction(0)] * (n - 1)
    for root in roots:
        row = [(row[k - 1] if k else Fraction(0)) - root * row[k] for k in range(n)]
    return tuple(row)


# -- the sum -------------------------------------------------------------------------------------------

class _Window(NamedTuple):
    """Windows along one axis: the data is read at `out` + `tap` along its dim `dim`."""

    out: UOp
    tap: UOp
    dim: int

    @property
    def extent(self) -> int:
        return int(self.out.src[0].arg)

    @property
    def taps(self) -> int:
        return int(self.tap.src[0].arg)


class _Correlation(NamedTuple):
    """A sum over channels and windows of data times taps, of float32. `data`, `taps`: the reads; `channels`: the summed RANGEs that are no
    taps of a window."""

    reduce: UOp
    data: UOp
    taps: UOp
    windows: tuple[_Window, ...]
    channels: tuple[UOp, ...]


def _match(store: UOp) -> _Correlation:
    reduce, reads = summed_product(store.src[1])
    summed = reduce.src[1:]
    if any(sy.is_symbolic(r) for r in (*store.src[2:], *summed)):
        raise KernelOptError("how many positions it has depends on a variable")
    for data, taps in (reads, reads[::-1]):
        windows = tuple(_windows(data, taps, store.src[2:], summed))
        if windows:
            channels = tuple([r for r in summed if all(r is not w.tap for w in windows)])
            if not channels:
                raise KernelOptError("it sums over no channels: transforms would cost more than they save")
            return _Correlation(reduce, data, taps, windows, channels)
    raise KernelOptError("it reads no windows whose positions are one apart")


def _windows(data: UOp, taps: UOp, outs: Sequence[UOp], summed: Sequence[UOp]) -> Iterator[_Window]:
    """The windows along which `data` is read at an output's position plus a tap's, and `taps` at the tap's alone."""
    for dim, e in enumerate(data.src[1:]):
        terms, const = sy.linear(e)
        out, tap = ([r for r in terms if r in ranges] for ranges in (outs, summed))
        if len(terms) == 2 and const == 0 and set(terms.values()) == {1} and len(out) == len(tap) == 1:
            others = [x for i, x in enumerate(data.src[1:]) if i != dim]
            if tap[0] in taps.src[1:] and not any(r in x.toposort() for r in (out[0], tap[0]) for x in (*others, *_others(taps, tap[0]))):
                yield _Window(out[0], tap[0], dim)


def _others(read: UOp, r: UOp) -> list[UOp]:
    """The coordinates of a read that are not `r` itself."""
    return [x for x in read.src[1:] if x is not r]


# -- the stages ----------------------------------------------------------------------------------------

def winograd(kernel: Kernel, name: str, m: int, copies: bool = False) -> Kernel:
    """Rewrite a kernel: its output `name` is computed in tiles of m positions along each window. `copies`: the products read U and V by way
    of stages that copy them. Raises KernelOptError with the reason."""
    return kernel.rewritten("WINOGRAD", name, (m, copies), lambda: _rewrite(kernel, name, m, copies))


def tile_sizes(kernel: Kernel, name: str) -> tuple[int, ...]:
    """The sizes of tiles that may pay for an output; () if it is no correlation."""
    try:
        store = kernel.stage_named(name).node
        found = _match(store)
    except KernelOptError:
        return ()
    channels = prod([sy.extent_of(r) for r in found.channels])
    results = prod([sy.extent_of(r) for r in store.src[2:] if r in found.taps.toposort(gate=lambda u: u.op is not Ops.STAGE)])
    fitting = [m for m in TILE_OUTPUTS if all(_fits(w, m) for w in found.windows) and _growth(found.windows, m) <= MOST_GROWTH]
    return tuple([m for m in fitting if _share(found.windows, m, channels, results) < MOST_OPERATIONS])


class StageElements(NamedTuple):
    """Elements of the stages of a rewritten kernel: of U, V and M, and of the results; `sums`: products that each element of M adds."""

    taps: int
    data: int
    products: int
    results: int
    sums: int


def elements_of_stages(kernel: Kernel, name: str, m: int) -> StageElements:
    """The sizes of the stages that WINOGRAD would make of an output. Raises KernelOptError if it is no correlation."""
    store = kernel.stage_named(name).node
    found = _match(store)
    points, tiles = prod([m + w.taps - 1 for w in found.windows]), {w.out: -(-w.extent // m) for w in found.windows}
    outs = store.src[2:]

    def elements(read: UOp) -> int:
        ranges = read.toposort(gate=lambda u: u.op is not Ops.STAGE)
        return points * prod([tiles.get(r, sy.extent_of(r)) for r in (*outs, *found.channels) if r in ranges])
    return StageElements(elements(found.taps), elements(found.data), points * prod([tiles.get(r, sy.extent_of(r)) for r in outs]),
                 prod([sy.extent_of(r) for r in outs]), prod([sy.extent_of(r) for r in found.channels]))


def window_axes(kernel: Kernel, name: str) -> tuple[int, ...]:
    """The axes of an output, by number, along which it has tiles. Raises KernelOptError if it is no correlation."""
    store = kernel.stage_named(name).node
    return tuple([store.src[2:].index(w.out) for w in _match(store).windows])


def _share(windows: Sequence[_Window], m: int, channels: int, results: int) -> float:
    """The operations of a tile as a share of those without tiles; an element of a transform counts as `TRANSFORM` of them."""
    points, plain = prod([m + w.taps - 1 for w in windows]), prod([m * w.taps for w in windows])
    return points * (channels * results + TRANSFORM * (channels + results)) / (plain * channels * results)


def _fits(w: _Window, m: int) -> bool:
    """Whether tiles may have m positions along a window."""
    return 1 < m <= w.extent and m + w.taps - 2 <= len(FINITE_POINTS)


def _growth(windows: Sequence[_Window], m: int) -> float:
    return prod([growth(m, w.taps) for w in windows])


def _rewrite(kernel: Kernel, name: str, m: int, copies: bool) -> UOp:
    store = kernel.stage_named(name).node
    if store.op is not Ops.STORE:
        raise KernelOptError(f"stage {name} is no output")
    found = _match(store)
    for w in found.windows:
        if not _fits(w, m):
            raise KernelOptError(f"a tile is 2 to {min(w.extent, len(FINITE_POINTS) + 2 - w.taps)} of the {w.extent} positions, not {m}")
    if _growth(found.windows, m) > MOST_GROWTH:
        raise KernelOptError(f"the bound of its errors would be {_growth(found.windows, m):.0f} times that of the sums as they are; "
                             f"{MOST_GROWTH} times is allowed")
    return _Stages(kernel.ast, store, found, m, copies).rewritten()


class _Transformed(NamedTuple):
    """A stage, and what each of its dims stands for: a dim of the read that it was made of, or a window, whose matrix's row it selects."""

    stage: UOp
    dims: tuple[int | _Window, ...]


class _Stages:
    """Builds the stages of a rewritten kernel."""

    def __init__(self, ast: UOp, store: UOp, found: _Correlation, m: int, copies: bool) -> None:
        self.ast, self.store, self.found, self.m, self.copies = ast, store, found, m, copies
        self.ranges = Ranges(ast)
        # the dims of the products: with copies, those of the taps alone come before those of the data alone
        self.own = tuple(sorted(store.src[2:], key=self._side)) if copies else store.src[2:]
        self.tiles = {w: -(-w.extent // m) for w in found.windows}

    def _side(self, r: UOp) -> int:
        """0 for a RANGE of the output that both factors have, 1 for one that only the taps have, 2 for one that only the data have."""
        taps, data = (any(r in e.toposort() for e in f.src[1:]) for f in (self.found.taps, self.found.data))
        return 0 if taps and data else 1 if taps else 2

    def rewritten(self) -> UOp:
        store = self.store
        outputs = self._outputs(self._products(self._taps(), self._data()))
        read = UOp(Ops.INDEX, dtypes.float32, (outputs, *self.own))
        value = store.src[1].substitute({self.found.reduce: read})
        return self.ast.substitute({store: store.replace(src=(store.src[0], value, *store.src[2:]))})

    def _taps(self) -> _Transformed:
        """U: the taps of each window times G, dim by dim."""
        read = self.found.taps
        made = _Transformed(read.src[0], tuple(range(len(read.src) - 1)))
        for w in self.found.windows:
            position = made.dims.index(read.src[1:].index(w.tap))
            own = self.ranges.like(*made.stage.src[1:])
            made = self._row(made, w, own, position, [sy.const(j) for j in range(w.taps)], None)
        return made

    def _data(self) -> _Transformed:
        """V: the data under each window times B, dim by dim."""
        read = self.found.data
        made = _Transformed(read.src[0], tuple(range(len(read.src) - 1)))
        for w in self.found.windows:
            position = made.dims.index(w.dim)
            reach, extent = self.tiles[w] * self.m + w.taps - 1, sy.extent_of(made.stage.src[1 + position])
            if reach > extent:
                made = made._replace(stage=Extension(self.ranges, extent, reach).stage(made.stage, position, 0))
            own = self.ranges.like(*made.stage.src[1:])
            tile = self.ranges.new(self.tiles[w])
            points = [sy.shift(sy.scale(tile, self.m), u) for u in range(self.m + w.taps - 1)]
            made = self._row(made, w, own, position, points, tile)
        return made

    def _row(self, of: _Transformed, w: _Window, own: tuple[UOp, ...], position: int, points: Sequence[UOp], tile: UOp | None) \
            -> _Transformed:
        """The stage of the rows of B times the values of a stage at `points` along one dim, over the row, and over the other dims of the
        stage, with `tile` in place of the dim; without a tile, of the rows of G."""
        which = self.ranges.new(self.m + w.taps - 1)
        values = [UOp(Ops.INDEX, dtypes.float32, (of.stage, *own[:position], at, *own[position + 1:])) for at in points]
        rows = data_rows(values) if tile is not None else [_combined(row, values) for row in tap_rows(self.m, w.taps)]
        dims = [(r if i != position else tile, d) for i, (r, d) in enumerate(zip(own, of.dims, strict=True)) if i != position or tile]
        return _Transformed(_stage(_chosen(which, rows), which, *[r for r, _ in dims if r is not None]), (w, *[d for _, d in dims]))

    def _products(self, taps: _Transformed, data: _Transformed) -> _Transformed:
        """M: for each row of the matrices, the product of both over the channels."""
        windows, own = self.found.windows, self.own
        rows = {w: self.ranges.new(self.m + w.taps - 1) for w in windows}
        tile = {w.out: self.ranges.new(self.tiles[w]) for w in windows}
        fresh = {r: tile[r] if r in tile else self.ranges.new(r.src[0].arg) for r in (*own, *self.found.channels)}

        def read(of: _Transformed, original: UOp) -> UOp:
            moved = {d.dim: tile[d.out] for d in windows} if original is self.found.data else {}

            def at(d: int | _Window) -> UOp:
                return rows[d] if isinstance(d, _Window) else moved[d] if d in moved else sy.simplify(original.src[1 + d], fresh)
            return UOp(Ops.INDEX, dtypes.float32, (self._copy(of.stage) if self.copies else of.stage, *map(at, of.dims)))

        product = UOp(Ops.MUL, dtypes.float32, (read(taps, self.found.taps), read(data, self.found.data)))
        summed = UOp(Ops.REDUCE, dtypes.float32, (product, *[fresh[r] for r in self.found.channels]), ("ADD", 1))
        return _Transformed(_stage(summed, *rows.values(), *[fresh[r] for r in own]), (*windows, *range(len(own))))

    def _copy(self, stage: UOp) -> UOp:
        """A stage with the values of another one, position by position."""
        own = self.ranges.like(*stage.src[1:])
        return _stage(UOp(Ops.INDEX, stage.dtype, (stage, *own)), *own)

    def _outputs(self, products: _Transformed) -> UOp:
        """A times the products, window by window: the dim of tiles becomes one of positions."""
        stage, dims = products.stage, list(products.dims)
        for w in self.found.windows:        # the first dim selects a row of the first window left
            del dims[0]
            tile = dims.index(self.own.index(w.out))
            own = [self.ranges.new(w.extent if i == tile else int(r.src[0].arg)) for i, r in enumerate(stage.src[2:])]
            at = [sy.floordiv(r, self.m) if i == tile else r for i, r in enumerate(own)]
            values = [UOp(Ops.INDEX, dtypes.float32, (stage, sy.const(k), *at)) for k in range(self.m + w.taps - 1)]
            stage = _stage(_chosen(sy.floormod(own[tile], self.m), output_rows(self.m, values)), *own)
        return stage


def _stage(value: UOp, *ranges: UOp) -> UOp:
    return UOp(Ops.STAGE, value.dtype, (value, *ranges))


def _chosen(which: UOp, rows: Sequence[UOp]) -> UOp:
    """The value of the row `which`."""
    chosen = rows[-1]
    for k in range(len(rows) - 2, -1, -1):
        is_it = UOp(Ops.CMPEQ, dtypes.bool, (which, sy.const(k)))
        chosen = UOp(Ops.WHERE, dtypes.float32, (is_it, rows[k], chosen))
    return chosen


def _combined(row: Row, values: Sequence[UOp]) -> UOp:
    """Σ factor · value, without the terms whose factor is 0; terms of factor 1 first."""
    total: UOp | None = None
    for factor, x in sorted([(f, x) for f, x in zip(row, values, strict=True) if f], key=lambda term: term[0] != 1):
        times = UOp.const(dtypes.float32, float(factor))
        if total is None:
            total = x if factor == 1 else UOp(Ops.MUL, x.dtype, (x, times))
        elif abs(factor) == 1:
            total = UOp(Ops.ADD if factor == 1 else Ops.SUB, x.dtype, (total, x))
        else:
            total = UOp(Ops.MULACC, x.dtype, (x, times, total))
    assert total is not None, "no row of a matrix is 0"
    return total
