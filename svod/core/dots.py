"""Dot instructions: a vector of sums of a few narrow products, as data, and which contractions they compute.

    acc[lane] += Σ over i < group of a[lane·group + i] · b[lane·group + i]

A group is one 32-bit word of 4 bytes or 2 halves. The operands are staged in their narrow type with the group innermost, rounded up to
whole groups and filled with zeros: masks and conversions die in the copy. One of them is read as a vector of words, the other one
as a word in all lanes.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from svod.core.dtype import DType, dtypes
from svod.core.kernel import Kernel, ResolvedStage, Stage
from svod.core.scheduler import Scheduler
from svod.core.target import Target
from svod.errors import KernelOptError


@dataclass(frozen=True)
class Dot:
    """An instruction. `sources`: the element types of a contraction's operands that it takes, as such or made wider in the copy.

    `operands`: the types it multiplies, in its order. Where they differ, operands of one type are made to fit by flipping the sign bit
    of the one that is not the vector, which adds or takes off 128; what this does to the sum is summed up beside it and taken off
    again. Both are exact modulo 2^32, as is the sum."""

    name: str
    arch: str
    features: tuple[str, ...]          # names of Target.features
    accumulator: DType
    operands: tuple[DType, DType]
    sources: tuple[DType, ...]
    group: int
    slow: tuple[tuple[str, float], ...] = ()

    def cost(self, target: Target) -> float:
        """Multiply-adds of one vector that take as long as one instruction: 1, or what `slow` says of a core by the start of its name."""
        return next((n for core, n in self.slow if target.cpu.startswith(core)), 1.0)

    def runs_on(self, target: Target) -> bool:
        return target.arch == self.arch and set(self.features) <= set(target.features)


_I8, _U8, _I16 = dtypes.int8, dtypes.uint8, dtypes.int16
DOTS: dict[str, Dot] = {d.name: d for d in (
    Dot("vnni8", "x86_64", ("avx512f", "vnni"), dtypes.int32, (_U8, _I8), (_I8, _U8), 4),
    Dot("vnni16", "x86_64", ("avx512f", "vnni"), dtypes.int32, (_I16, _I16), (_I8, _U8, _I16), 2),
    Dot("bf16", "x86_64", ("avx512f", "bf16"), dtypes.float32, (dtypes.bfloat16, dtypes.bfloat16), (dtypes.bfloat16,), 2,
        # one every two cycles on Intel's cores, of which some go by an older name where LLVM does not know them
        tuple((core, 4.0) for core in ("cooperlake", "sapphirerapids", "emeraldrapids", "graniterapids", "rocketlake", "icelake"))),
)}


class Operand(NamedTuple):
    """A factor of a contraction: the stage it reads, the dim of it that is summed over, its narrow type, and the local axes it needs."""

    node: int
    stage: int
    dim: int
    source: DType
    axes: tuple[int, ...]


def operands_of(kernel: Kernel, r: ResolvedStage, axis: int) -> tuple[Operand, Operand]:
    """The factors of the sum of products in `r`, of which both run along reduce axis `axis` by itself.

    Raises KernelOptError with the reason where it is none, or where a factor is not a narrow number made wide."""
    if len(r.reductions) != 1 or r.reductions[0].combiner != "ADD":
        raise KernelOptError(f"stage {r.stage.name} is not one sum")
    product = r.nodes[r.reductions[0].values[0]]
    if product.kind != "alu" or product.op != "MUL" or any(r.nodes[n].kind != "read" for n in product.src):
        raise KernelOptError(f"stage {r.stage.name} does not sum up products of two stages")
    local = r.axes.index(axis)
    found = []
    for n in product.src:
        node = r.nodes[n]
        dims = [i for i, lin in enumerate(node.dims) if lin.coef(local) or any(local in r.nodes[a].deps for a, _ in lin.atoms)]
        name = kernel.stages[node.arg].name
        if len(dims) != 1 or (lin := node.dims[dims[0]]).coefs != ((local, 1),) or lin.const or lin.atoms:
            raise KernelOptError(f"{name} is not read along {kernel.axes[axis].name} alone, position by position")
        source = narrow_source(kernel.stages[node.arg])
        if source is None:
            raise KernelOptError(f"{name} is no value of a narrower type that was made wide")
        found.append(Operand(n, node.arg, dims[0], source, node.deps))
    if found[0].stage == found[1].stage:
        raise KernelOptError(f"both factors are read from {kernel.stages[found[0].stage].name}, which is laid out for one of them")
    return found[0], found[1]


def narrow_source(stage: Stage) -> DType | None:
    """The type of a stage's value before it was made wide, None where it is no conversion."""
    value = stage.value
    return value.src[0].dtype if value.op.value == "CAST" and not stage.is_output and not stage.has_reduce else None


def check(state: Scheduler, stage: int, axis: int, dot: Dot) -> tuple[Operand, Operand]:
    """The operands of `dot` where it computes the contraction in `stage`. Raises KernelOptError with the reason where it does not."""
    kernel = state.kernel
    if not dot.runs_on(state.target):
        raise KernelOptError(f"the target has no {' and '.join(dot.features)} on {dot.arch}; its features are "
                             f"{', '.join(state.target.features)}")
    r = kernel.resolve(frozenset())[stage]
    assert r is not None
    found = operands_of(kernel, r, axis)
    total = r.reductions[0].dtypes[0]
    if total != dot.accumulator or any(o.source not in dot.sources for o in found):
        raise KernelOptError(f"{dot.name} sums up {', '.join(d.name for d in dot.sources)} in {dot.accumulator.name}; the stage "
                             f"{' by '.join(o.source.name for o in found)} in {total.name}")
    for o in found:
        if sum(o.stage in reads for reads in kernel.reads) != 1:
            raise KernelOptError(f"{kernel.stages[o.stage].name} is read by other stages too")
    return found


def applicable(state: Scheduler, stage: int) -> Iterator[tuple[str, str]]:
    """(reduce axis, instruction) of what TC may do to a stage."""
    for axis in state.kernel.stages[stage].reds:
        for dot in DOTS.values():
            try:
                check(state, stage, axis, dot)
            except KernelOptError:
                continue
            yield state.kernel.axes[axis].name, dot.name


class Packed(NamedTuple):
    """How an operand of a dot instruction is staged: its dim along the sum in groups, as `dtype`, perhaps with the sign bit flipped."""

    dim: int
    group: int
    padded: int                # positions of the dim, whole groups
    dtype: DType
    flipped: bool


class Plan(NamedTuple):
    """A dot instruction of a stage: its operands in the order of the instruction, and whether flipped sign bits must be made up for."""

    dot: Dot
    operands: tuple[Operand, Operand]
    packed: tuple[Packed, Packed]

    @property
    def corrects(self) -> int:
        """The operand (0 or 1) that is summed up because the other one has its sign bit flipped, or -1."""
        return next((1 - i for i, p in enumerate(self.packed) if p.flipped), -1)


def plan_dot(state: Scheduler, r: ResolvedStage, lane: int) -> Plan | None:
    """The instruction that TC chose for a stage whose vectors run along local axis `lane` (-1: none)."""
    chosen = state.dots[r.stage.index]
    if chosen is None:
        return None
    axis, name = chosen
    dot = DOTS[name]
    found = list(operands_of(state.kernel, r, axis))
    flipped = -1
    if dot.operands[0] != dot.operands[1]:
        if found[0].source == found[1].source:
            broadcast = next((i for i, o in enumerate(found) if lane not in o.axes), 0)
            if (found[broadcast].source == dot.operands[0]) == (broadcast == 0):
                found.reverse()
                broadcast = 1 - broadcast
            flipped = broadcast
        elif found[0].source != dot.operands[0]:
            found.reverse()
    padded = state.axis_extent(axis)
    packed = [Packed(o.dim, dot.group, padded, dot.operands[i], i == flipped) for i, o in enumerate(found)]
    return Plan(dot, (found[0], found[1]), (packed[0], packed[1]))


class Rate(NamedTuple):
    """What a stage with a dot instruction costs: products per instruction, the multiply-adds it takes as long as, whether it corrects."""

    group: int
    cost: float
    corrects: bool


def rate_of(state: Scheduler, stage: int) -> Rate:
    """The instruction that sums up in a stage: that of TC, or a multiply-add."""
    chosen = state.dots[stage]
    if chosen is None:
        return Rate(1, 1.0, False)
    dot = DOTS[chosen[1]]
    r = state.kernel.resolve(frozenset())[stage]
    assert r is not None
    a, b = operands_of(state.kernel, r, chosen[0])
    return Rate(dot.group, dot.cost(state.target), dot.operands[0] != dot.operands[1] and a.source == b.source)


def stored_bytes(state: Scheduler, stage: int) -> int:
    """Bytes of one element of a stage's value where it is staged."""
    for s, chosen in enumerate(state.dots):
        if chosen is not None:
            r = state.kernel.resolve(frozenset())[s]
            assert r is not None
            if stage in (o.stage for o in operands_of(state.kernel, r, chosen[0])):
                return DOTS[chosen[1]].operands[0].itemsize
    return state.kernel.stages[stage].dtype.itemsize


def packed_stages(state: Scheduler) -> frozenset[int]:
    """The stages that are operands of dot instructions."""
    found: set[int] = set()
    for s, chosen in enumerate(state.dots):
        if chosen is not None:
            r = state.kernel.resolve(frozenset())[s]
            assert r is not None
            found.update(o.stage for o in operands_of(state.kernel, r, chosen[0]))
    return frozenset(found)
