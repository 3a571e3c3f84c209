"""Facts that sketches read from a kernel: the factors of a contraction, axes along which memory is contiguous, amounts that fit an axis."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from svod.core.cost.caches import Caches
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.contraction import product_of, through_casts
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS, Dot
from svod.core.tree.nodes import has_two_widths
from svod.errors import KernelOptError

SHARED_CACHE_BYTES = 32 << 20   # bytes of the last cache that may be free for one program; larger last caches are shared by many cores
EQUAL_WASTE = 0.03              # shares of idle lanes that differ by less than this count as equal


def try_opt(state: Scheduler, op: str, axis: str, arg: Any = None) -> Scheduler:
    """The state after an opt, or the same state if the opt does not apply."""
    try:
        return apply_opt(state, Opt(op, axis, arg))
    except KernelOptError:
        return state


def first_change(state: Scheduler, *opts: tuple[str, str, Any]) -> Scheduler:
    """The state after the first of these opts that applies, or the same state if none does."""
    return next((after for opt in opts if (after := try_opt(state, *opt)) is not state), state)


@dataclass(frozen=True)
class Factor:
    """A factor of a contraction."""

    node: int
    axes: frozenset[int]
    stage: int                  # the stage that it reads, or -1 if it is no read
    unit: frozenset[int]        # local axes along which it is contiguous in memory
    staged_unit: frozenset[int] # local axes along which it would be contiguous if its stage were staged


def resolved(state: Scheduler, s: int) -> ResolvedStage:
    """Stage `s` with no other stage inlined, so that its operands are visible as reads."""
    resolved = state.kernel.resolve(frozenset())[s]
    assert resolved is not None
    return resolved


class Instruction(NamedTuple):
    """A dot or matrix instruction for a sum along `axis`. `arg`: the argument of TC: its name, or (name, rows axis, columns axis) for
    tiles."""

    axis: str
    arg: Any

    @property
    def has_tiles(self) -> bool:
        return isinstance(self.arg, tuple)

    @property
    def dot(self) -> Dot:
        return DOTS[self.arg[0] if self.has_tiles else self.arg]

    def __str__(self) -> str:
        return self.dot.name


def instructions(state: Scheduler, s: int) -> list[Instruction]:
    """The instructions that can compute the sums of a stage."""
    return [Instruction(axis, arg) for axis, arg in applicable(state.kernel, state.target, s)]


class ContiguousAxes(NamedTuple):
    """The local axes along which a node reads with stride 1: from memory as it is, and if the stage it reads were staged."""

    direct: frozenset[int] = frozenset()
    staged: frozenset[int] = frozenset()


def contiguous_axes(state: Scheduler, r: ResolvedStage, node: int) -> ContiguousAxes:
    """The axes along which a node of a stage reads contiguous memory."""
    n = r.nodes[node]
    if n.kind == "load":
        assert n.linear is not None
        unit = frozenset(a for a, c in n.linear.coefs if c == 1)
        return ContiguousAxes(unit, unit)
    if n.kind == "read":
        strides = _strides(state, n.arg, {})
        direct, staged = set(), set()
        for dim, lin in enumerate(n.dims):
            for a, c in lin.coefs:
                if abs(c) == 1 and sum(1 for other in n.dims if other.coef(a)) == 1:
                    staged.add(a)
                    if strides.get(dim) == {1} and c == 1:
                        direct.add(a)
        return ContiguousAxes(frozenset(direct), frozenset(staged))
    parts = [contiguous_axes(state, r, s) for s in n.src]
    return ContiguousAxes(frozenset().union(*[p.direct for p in parts]), frozenset().union(*[p.staged for p in parts]))


def _strides(state: Scheduler, s: int, found: dict[int, dict[int, set[int]]]) -> dict[int, set[int]]:
    """Axis of a stage → the strides, in elements, of the loads that it moves, including loads of elementwise values that the stage reads; 0
    for a gathered load. `found`: results for other stages."""
    if s in found:
        return found[s]
    r, strides = resolved(state, s), dict[int, set[int]]()
    for n in r.nodes:
        if n.kind == "load":
            assert n.linear is not None
            parts = [(n.linear, {1})]
        elif n.kind == "read" and is_derived(state.kernel.stages[n.arg]):
            inner = _strides(state, n.arg, found)
            parts = [(lin, inner.get(dim, set())) for dim, lin in enumerate(n.dims)]
        else:
            continue
        for lin, units in parts:
            gathered = {a for x, _ in lin.atoms for a in r.nodes[x].deps}
            for a in gathered.union(a for a, _ in lin.coefs):
                strides.setdefault(a, set()).update({0} if a in gathered else {lin.coef(a) * unit for unit in units})
    found[s] = strides
    return strides


def factors_of(state: Scheduler, r: ResolvedStage) -> tuple[Factor, Factor] | None:
    """The two factors of a contraction; None if the stage is not one."""
    factors = factors_of_product(state, r)
    if factors is None:
        return None
    a, b = factors
    outs = frozenset(i for i in range(len(r.stage.outs)) if extent_of(state, r, i) > 1)
    return factors if (outs - a.axes) and (outs - b.axes) else None


def factors_of_product(state: Scheduler, r: ResolvedStage) -> tuple[Factor, Factor] | None:
    """The two factors of a sum of products; None if the stage is not one."""
    product = product_of(r)
    if product is None:
        return None
    factors = []
    for n in through_casts(r, product.src):
        unit, staged = contiguous_axes(state, r, n)
        factors.append(Factor(n, frozenset(r.nodes[n].deps), r.nodes[n].arg if r.nodes[n].kind == "read" else -1, unit, staged))
    return factors[0], factors[1]


def extent_of(state: Scheduler, r: ResolvedStage, local: int) -> int:
    return state.kernel.axes[r.axes[local]].extent


def name_of(state: Scheduler, r: ResolvedStage, local: int) -> str:
    return state.kernel.axes[r.axes[local]].name


def bytes_of(state: Scheduler, s: int) -> int:
    st = state.kernel.stages[s]
    total = st.dtype.itemsize
    for a in st.outs:
        total *= state.kernel.axes[a].extent
    return total


def bytes_of_arguments(state: Scheduler) -> int:
    size: int = state.kernel.nbytes
    return size


def outgrows_caches(state: Scheduler) -> bool:
    """Whether the caches evict the output before the next kernel reads it. If they keep it, storing past them makes this kernel faster and
    the next one slower; timing this kernel alone would show only the gain."""
    return bytes_of_arguments(state) > max(state.target.l2, Caches.kept_share * min(state.target.l3, SHARED_CACHE_BYTES))


def is_constant(state: Scheduler, s: int) -> bool:
    r = resolved(state, s)
    loads = [n for n in r.nodes if n.kind == "load"]
    return bool(loads) and not r.reads and all(state.kernel.params[n.arg].arg.constant for n in loads)


def lane_amounts(extent: int, width: int, vectors: int) -> list[int]:
    """Amounts for a vector axis, of at most `vectors` vectors; the amounts that waste the fewest lanes come first. A short axis is taken
    whole."""
    if extent <= width:
        return [extent]
    options = [v * width for v in range(1, vectors + 1) if v * width <= extent]
    if extent <= vectors * width:
        options.append(extent)
    # an axis of 56 or 28 is better cut evenly, with some idle lanes, than into whole vectors whose last tile overlaps the one before
    options += [d for d in range(width + 1, vectors * width) if extent % d == 0 and d * 10 >= -(-d // width) * width * 7]

    def waste(n: int) -> float:
        return -(-extent // n) * -(-n // width) * width / extent
    return sorted(dict.fromkeys(options), key=lambda n: (round((waste(n) - 1.0) / EQUAL_WASTE), -n))


def rows_held(lanes: int, width: int, registers: int) -> int:
    """The most rows of a register tile that fit the registers; at least 1. Each row has a register of results for each vector, a row of
    vectors holds one operand, and one register an element of the other. A last vector that is narrower takes two (`Cpu.narrow_cycles`)."""
    vectors = -(-lanes // width)
    return max(1, (registers - vectors - 1) // (vectors + has_two_widths(lanes, width)))


def tile_amounts(extent: int, limit: int) -> list[int]:
    """Numbers of rows of a register tile, up to `limit`, best first: those whose last tile computes few positions twice, then large
    ones."""
    options = list(range(min(limit, extent), 0, -1))

    def waste(n: int) -> float:
        return -(-extent // n) * n / extent
    return sorted(dict.fromkeys(options), key=lambda n: (waste(n) * (1.0 + 0.6 / n), -n))
