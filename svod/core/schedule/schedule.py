"""`create_schedule` turns a graph into kernels, in an order in which they can run.

    SINK(outputs)  →  normalise  →  cut (which nodes get a buffer)  →  per kernel: rangeify, split and merge ranges,
                      narrow PARAMs, canonical form
                   →  order: reads after the writes they need, ASSIGNs after the reads of the content that they overwrite

Every buffer has *versions*. Version 0 is its content when the schedule starts; each AFTER makes the next version. The ASSIGNs of an
AFTER write disjoint parts of the buffer, in any order or in parallel; the rest of the buffer is unchanged. Each invocation of a CALL
makes one version of every buffer that it writes (`svod.core.schedule.calls`). A kernel reads one version and must run before the
ASSIGNs that overwrite it. If no order satisfies this (a swap of two buffers), the old content is copied first.

A value that is joined with others in a new buffer, such as a state of a recurrence, has no buffer of its own: its kernel writes its part of
the joined one, and other kernels read it there.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

from svod.core.graph.callback import call_of, callback_ast, is_callback
from svod.core.graph.devices import device_of, is_transfer, readers_devices
from svod.core.graph.graph import is_memory, part_of_memory, permute, storage_view
from svod.core.graph.shapes import shape_of, size_of, storage_size
from svod.core.graph.storage import base_of, storage_of
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.origin import origin_of
from svod.core.ir.param import Param
from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.ir.variable import Dim
from svod.core.machine.levels import CACHE_LINE_BYTES
from svod.core.machine.target import HOST
from svod.core.schedule.axes import merge_ranges, split_ranges
from svod.core.schedule.calls import Invocation, arguments_of, call_under, kernel_of_call, programs_of, unroll, written_slots
from svod.core.schedule.canonical import canonicalize
from svod.core.schedule.cut import BY_RULES, Cut, Deviations, is_contraction, is_reduction
from svod.core.schedule.kernel_variables import rename_variables
from svod.core.schedule.levels import levels_of, order_of
from svod.core.schedule.normalize import Normalized, normalize
from svod.core.schedule.rangeify import StoreOutput, rangeify, reads_memory
from svod.core.schedule.regions import are_disjoint, begin_at_zero, narrow_params, regions_of
from svod.errors import DeviceError, ScheduleError


@dataclass(frozen=True)
class KernelCall:
    """One kernel of a schedule. `ast`: canonical SINK. `args`: a BUFFER per slot, outputs first. `offsets`: per slot the element of the
    buffer at which the PARAM begins. `deps`: positions in `Schedule.calls` of the calls that must run before. `origin`: module path or
    file:line, "" if unknown. `why`: the rule that made it a kernel. `variables`: the DEFINE_VAR of the graph for each of v0, v1, …."""

    ast: UOp
    args: tuple[UOp, ...]
    offsets: tuple[int, ...]
    name_hint: str
    origin: str
    deps: tuple[int, ...]
    why: str
    variables: tuple[UOp, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """`calls`: the kernels in an executable order. `outputs`: the BUFFER of each source of the SINK after all calls, flat, row-major."""

    calls: tuple[KernelCall, ...]
    outputs: tuple[UOp, ...]

    def levels(self) -> list[int]:
        """The length of the longest chain of calls that each call waits for: calls of a level are independent.

        Raises ScheduleError if a call depends on a later call."""
        return levels_of(self.calls)


class Version(NamedTuple):
    """A version of a buffer's content: 0 when the schedule begins, one more with each AFTER."""

    buffer: UOp
    number: int


class _PartOfBuffer(NamedTuple):
    """A part of a buffer, which a value is computed in. `whole`: the version that has all parts. `first`: the part's first element."""

    whole: Version
    first: int


@dataclass
class _Pending:
    """A kernel before it is ordered. `reads`, `writes` and `args` (by slot): (buffer, version); `offsets`: the element at which each PARAM
    begins."""

    ast: UOp
    args: list[Version]
    offsets: list[int]
    outs: int
    name_hint: str
    origin: str
    why: str
    variables: tuple[UOp, ...] = ()
    root: UOp | None = None     # the stored node; None for a call, and for a copy that the order needs
    snapshots: dict[Version, UOp] = field(default_factory=dict)
    after: tuple[Version, ...] = ()     # other versions that must have been written before

    @property
    def writes(self) -> list[Version]:
        return self.args[:self.outs]

    @property
    def reads(self) -> list[Version]:
        return [Version(self.snapshots[v], 0) if v in self.snapshots else v for v in self.args[self.outs:]]


class KernelAst(NamedTuple):
    """A canonical AST, and for each slot the BUFFER, and its element at which the PARAM begins."""

    ast: UOp
    buffers: tuple[UOp, ...]
    offsets: tuple[int, ...]
    variables: tuple[UOp, ...] = ()     # variables of the graph, in the order of the kernel's variables


_observer: ContextVar[Callable[[UOp, dict[str, UOp]], None] | None] = ContextVar("observer", default=None)
"""Told of each kernel that is not remembered: its AST, and what each pass made of it, by the pass."""


def kernel_ast(value: UOp, target: UOp, constants: frozenset[UOp] = frozenset(), *, remember: bool = True) -> KernelAst:
    """The kernel that stores the graph node `value` into `target`, a view of a BUFFER. `remember`: use the cache of kernels, as the layers
    of a model repeat."""
    return (_remembered_ast if remember else _made_ast)(value, target, constants)


def _made_ast(value: UOp, target: UOp, constants: frozenset[UOp]) -> KernelAst:
    """`kernel_ast` without the cache: all passes from rangeify to the canonical form."""
    ranged, buffers = rangeify([StoreOutput(value, target)], constants)
    axes, first = narrow_params(merge_ranges(split_ranges(ranged)))
    renamed, variables = rename_variables(axes)
    ast, slots = canonicalize(renamed)
    observe = _observer.get()
    if observe is not None:
        observe(ast, {"rangeify": ranged, "axes": axes, "canonical": ast})
    return KernelAst(ast, tuple(buffers[s] for s in slots), tuple(first.get(s, 0) for s in slots), variables)


_remembered_ast = lru_cache(maxsize=4096)(_made_ast)


def part_ast(value: UOp, target: UOp, constants: frozenset[UOp], *, remember: bool) -> KernelAst:
    """Like `kernel_ast`, but parts of a buffer that differ only in the element at which they begin share one cached result."""
    (moved_value, moved_target), first = begin_at_zero((value, target))
    if not first:
        return kernel_ast(value, target, constants, remember=remember)
    made = kernel_ast(moved_value, moved_target, constants, remember=remember)
    offsets = tuple(k + first.get(b, 0) for b, k in zip(made.buffers, made.offsets, strict=True))
    ends = [0] * len(offsets)
    for p in made.ast.walk(Ops.PARAM):
        ends[p.arg.slot] = offsets[p.arg.slot] + p.arg.size
    if any(end > b.arg for b, end in zip(made.buffers, ends, strict=True)):     # a PARAM that is read under a gate was not narrowed
        return kernel_ast(value, target, constants, remember=remember)
    return made._replace(offsets=offsets)


def create_schedule(sink: UOp, constants: frozenset[UOp] = frozenset(), deviations: Deviations = BY_RULES, *,
                    remember: bool = True) -> Schedule:
    """The kernels that compute the sources of `sink`, a SINK of graph nodes. BUFFERs in `constants` are weights of the plan.
    `deviations`: what is done otherwise than by the rules. `remember`: reuse kernels that this process has already cut, and cache new ones.

    New BUFFERs are numbered from 0 (LUNIQUE), so equal graphs give equal schedules. Raises ScheduleError."""
    if sink.op is not Ops.SINK:
        raise ScheduleError(f"a schedule is made of a SINK of graph nodes, found {sink!r}; wrap the outputs in svod.core.graph.graph.sink")
    return _Builder(normalize(sink), constants, deviations, remember).run()


@dataclass(frozen=True)
class Explained:
    """A schedule with the intermediate results of its passes. `graph`: the normalised graph. `cut`: its cut into kernels. `roots`: for each
    call the node that it stores, None for a kernel written by hand and for a copy that the order needs. `passes`: kernel AST → the results
    of rangeify, axes and canonical. `movable`: the realised nodes that may be stored in any order of their axes."""

    graph: Normalized
    cut: Cut
    schedule: Schedule
    roots: tuple[UOp | None, ...]
    passes: dict[UOp, dict[str, UOp]]
    movable: frozenset[UOp]


def explain_schedule(sink: UOp, constants: frozenset[UOp] = frozenset(), deviations: Deviations = BY_RULES) -> Explained:
    """Like `create_schedule`, but returns the intermediate results of its passes as well. Uses no cache. Raises ScheduleError."""
    builder = _Builder(normalize(sink), constants, deviations, False)
    passes: dict[UOp, dict[str, UOp]] = {}
    token = _observer.set(passes.__setitem__)
    try:
        schedule = builder.run()
    finally:
        _observer.reset(token)
    return Explained(builder.graph, builder.cut, schedule, tuple(builder.pending[i].root for i in builder.sequence), passes,
                     builder.movable)


class _Builder:
    def __init__(self, graph: Normalized, constants: frozenset[UOp], deviations: Deviations, remember: bool):
        self.graph, self.constants, self.deviations, self.remember = graph, constants, deviations, remember
        self.cut = Cut(graph.sink, graph.roots, deviations)
        devices = {u.src[1]: None for u in graph.sink.toposort() if u.op is Ops.BUFFER or u.op is Ops.COPY}
        self.host = UOp(Ops.DEVICE, dtypes.void, (), HOST)
        self.device = next(iter(devices), self.host)        # the device of all values, unless there are several
        self.has_several_devices = len(devices) > 1
        self.readers = readers_devices(graph.sink) if self.has_several_devices else {}
        self.lunique = 0
        self.buffer_of: dict[UOp, UOp] = {}        # realised node → its new buffer
        self.parts: dict[UOp, _PartOfBuffer] = {}          # new buffer → the part of another new buffer that stands in its place
        # constants that a library kernel or a call reads from memory
        operands = [s for u in graph.roots if u.op is Ops.CUSTOM_FUNCTION for s in u.src]
        parts = [part_of_memory(s, lambda n: is_memory(n) or n in graph.roots) for s in operands]
        self.stored = {*[base_of(s) for s in operands], *[part[0] for part in parts if part is not None]}
        self.stored.update(a for u in graph.roots if u.op is Ops.CALL for a in arguments_of(u))
        self.movable: frozenset[UOp] = frozenset()         # realised nodes that may be stored in any order of their axes
        self.placed: set[UOp] = set()              # ASSIGNs of values that are computed in their place
        self.version_of: dict[UOp, Version] = {}   # AFTER → the version it denotes; ASSIGN → the version it writes a part of
        self.versions: set[Version] = set()
        has_calls = any(u.op is Ops.CALL or u.op is Ops.END for u in graph.roots)
        self.programs = programs_of(graph.sink) if has_calls else {}
        # CALL or END → its invocations with their arguments
        self.invocations: dict[UOp, list[tuple[Invocation, list[Version | UOp]]]] = {}
        self.left: dict[UOp, dict[UOp, int]] = {}       # CALL or END → buffer → the version after it
        self.callbacks: dict[Hashable, list[UOp]] = {}      # call of a Python function → its results that are used
        self.pending: list[_Pending] = []

    def new_buffer(self, dtype: DType, size: int, like: UOp) -> UOp:
        """A new BUFFER on the device of the value `like`. Raises DeviceError if `like` reads no memory and is read on several devices."""
        unique = UOp(Ops.LUNIQUE, dtypes.void, (), self.lunique)
        self.lunique += 1
        return UOp(Ops.BUFFER, dtype, (unique, self.device_for(like)), size)

    def device_for(self, like: UOp) -> UOp:
        if not self.has_several_devices:
            return self.device
        own = device_of(like)
        read_on = sorted(self.readers.get(like, ()) if own is None else (own,)) or [HOST]
        if len(read_on) > 1:
            raise DeviceError(f"a value of shape {shape_of(like)} made of constants alone is read on {' and on '.join(read_on)}: realize() "
                              "it, and copy it with `to`")
        return UOp(Ops.DEVICE, dtypes.void, (), read_on[0])

    def run(self) -> Schedule:
        roots = self.cut.run()
        layouts: dict[UOp, UOp] = {}
        for u in roots:
            if u.op is Ops.AFTER:
                self.add_version(u)
            elif u in self.programs:
                self.add_versions(u)
            elif u.op in (Ops.ASSIGN, Ops.CALL, Ops.END):
                continue
            elif not is_constant(u) or u in self.graph.outputs or u in self.stored:
                layouts[u] = u if u in self.graph.roots or u in self.deviations.orders else self.cut.layout_of(u)
                self.buffer_of[layouts[u]] = self.new_buffer(u.dtype, storage_size(u), u)
                if is_callback(u):
                    self.callbacks.setdefault(call_of(u), []).append(u)
        self.place_parts(roots, layouts)
        self.movable = self.find_movable(layouts)
        for u, why in roots.items():
            if u.op is Ops.ASSIGN:
                self.add_assign(u, why)
            elif is_callback(u):
                self.add_callback(self.callbacks.pop(call_of(u), []), why)
            elif u.op is Ops.CUSTOM_FUNCTION:
                self.add_library_kernel(u, why)
            elif u in self.programs:
                self.add_calls(u, why)
            elif u.op is Ops.COPY and self.has_several_devices and is_transfer(u):
                self.add_transfer(u, why)
            elif u in layouts:
                layout = layouts[u]
                self.add_kernel(u, u.src[0] if u.op is Ops.COPY else u, Version(self.buffer_of[layout], 0), why,
                                partial(self.stored_view, u) if layout is u else partial(unmoved, layout, u))
        outputs = tuple(self.output(u) for u in self.graph.outputs)
        return Schedule(tuple(self.order()), outputs)

    def add_version(self, u: UOp) -> None:
        """Number the version of a buffer that an AFTER creates."""
        storage, before = self.version(u.src[0])
        called = call_under(u)
        if called is None:
            self.number(storage, before + 1)
            for n in (u, *u.src[1:]):
                self.version_of[n] = Version(storage, before + 1)
            return
        written = self.left.get(called, {storage: before})      # inside a loop: the version with which the loop begins
        if storage not in written:
            raise ScheduleError(f"AFTER names a buffer of {storage.arg} {storage.dtype.name} and a call that does not write it")
        self.version_of[u] = Version(storage, written[storage])

    def number(self, storage: UOp, version: int) -> None:
        if (storage, version) in self.versions:
            raise ScheduleError(f"two ASSIGNs start from the same content of a buffer of {storage.arg} {storage.dtype.name}: assign to "
                                "what the first one leaves")
        self.versions.add(Version(storage, version))

    def place_parts(self, roots: Iterable[UOp], layouts: dict[UOp, UOp]) -> None:
        """Have values that are joined in a new buffer computed in their parts of it, where all their readers find them. The ASSIGNs of
        these parts copy nothing then."""
        for after in roots:
            storage, version = self.version_of[after] if after.op is Ops.AFTER else Version(after, 0)
            if version != 1 or storage.src[0].op is not Ops.LUNIQUE or Version(storage, 2) in self.versions:
                continue
            for assign in (s for s in after.src[1:] if s.op is Ops.ASSIGN):
                value = base_of(assign.src[1])
                part, own = part_of_memory(assign.src[0]), self.buffer_of.get(value)
                if (part is not None and part[1] * storage.dtype.itemsize % CACHE_LINE_BYTES == 0 and value not in self.deviations.orders
                        and self.can_move(value, layouts) and own is not None and own not in self.parts
                        and (own.dtype, own.arg) == (storage.dtype, size_of(assign))):
                    self.parts[own] = _PartOfBuffer(Version(storage, version), part[1])
                    self.placed.add(assign)

    def can_move(self, value: UOp, layouts: dict[UOp, UOp]) -> bool:
        """Whether a value may be stored elsewhere, in a part of a buffer or in another order: nothing needs a buffer of its own, in its own
        order."""
        return (layouts.get(value) is value and value.op not in (Ops.COPY, Ops.CUSTOM_FUNCTION) and value not in self.stored
                and value not in self.graph.outputs)

    def find_movable(self, layouts: dict[UOp, UOp]) -> frozenset[UOp]:
        """The realised nodes with a buffer of their own that may be stored in any order of their axes."""
        return frozenset(u for u in layouts if self.can_move(u, layouts) and self.buffer_of[u] not in self.parts)

    def add_versions(self, head: UOp) -> None:
        """Number the versions that each invocation of a call or loop creates of the buffers that it writes."""
        invocations = unroll(self.programs[head].steps)
        applied = {call: arguments_of(call) for call in dict.fromkeys(i.call for i in invocations)}
        written = {call: written_slots(call) for call in applied}
        self.check_contents(applied, written)
        latest: dict[UOp, int] = {}
        calls: list[tuple[Invocation, list[Version | UOp]]] = []
        for invocation in invocations:
            arguments: list[Version | UOp] = []
            for a in applied[invocation.call]:
                if a.op is Ops.BUFFER or a.op is Ops.AFTER:
                    storage, version = self.version(a)
                    arguments.append(Version(storage, latest.get(storage, version)))
                else:
                    arguments.append(a)
            for slot in written[invocation.call]:
                argument = arguments[slot]
                assert isinstance(argument, tuple)      # ensured by check_call: a slot that is written is memory
                storage, version = argument
                latest[storage] = version + 1
                self.number(storage, version + 1)
                arguments[slot] = Version(storage, version + 1)
            calls.append((invocation, arguments))
        self.invocations[head], self.left[head] = calls, latest

    def check_contents(self, applied: dict[UOp, tuple[UOp, ...]], written: dict[UOp, tuple[int, ...]]) -> None:
        """Raise ScheduleError for a loop that overwrites a buffer and reads two different versions of it from before the loop."""
        first: dict[UOp, int] = {}
        overwritten = {self.version(applied[call][slot]).buffer for call, slots in written.items() for slot in slots}
        for a in (a for arguments in applied.values() for a in arguments if a.op is Ops.BUFFER or a.op is Ops.AFTER):
            if a.op is Ops.AFTER and (called := call_under(a)) is not None and called not in self.left:
                continue        # a version that a call of the loop writes
            storage, version = self.version(a)
            if storage in overwritten and first.setdefault(storage, version) != version:
                raise ScheduleError(f"a loop of calls overwrites a buffer of {storage.arg} {storage.dtype.name} and reads two contents of "
                                    "it from before the loop; copy the older one before it is overwritten")

    def version(self, content: UOp) -> Version:
        """The version of a buffer that a BUFFER or AFTER denotes."""
        return Version(content, 0) if content.op is Ops.BUFFER else self.version_of[content]

    def output(self, u: UOp) -> UOp:
        if u.op is Ops.BUFFER or u.op is Ops.AFTER:
            return storage_of(u)
        return self.buffer_of[u] if u in self.buffer_of else self.new_buffer(u.dtype, 0, u)

    # -- kernels ----------------------------------------------------------------------------
    def ends(self, n: UOp, root: UOp) -> bool:
        """Whether the kernel of `root` reads node `n` from a buffer."""
        return n.op is Ops.BUFFER or n.op is Ops.AFTER or (n is not root and n in self.buffer_of and not is_constant(n))

    def origin(self, root: UOp, value: UOp) -> str:
        """The origin of a kernel: the origin of its contraction, which takes most of the time; without one, the origin of the stored
        value."""
        nodes = value.toposort(gate=lambda n: not self.ends(n, root))
        heavy = next((n for n in nodes if n.op is Ops.REDUCE_AXIS and not self.ends(n, root) and is_contraction(n)), None)
        return (origin_of(heavy) if heavy is not None else None) or origin_of(root) or origin_of(value) or ""

    def kernel_graph(self, value: UOp, root: UOp) -> tuple[UOp, dict[UOp, Version]]:
        """(`value` over stand-in BUFFERs, stand-in → version that it stands for). Stand-ins are numbered by first appearance, so that equal
        layers give equal graphs."""
        stand_ins: dict[Version, UOp] = {}

        def leaf(v: Version) -> UOp:
            if v not in stand_ins:
                unique = UOp(Ops.LUNIQUE, dtypes.void, (), len(stand_ins))
                stand_ins[v] = UOp(Ops.BUFFER, v.buffer.dtype, (unique, self.host), v.buffer.arg)
            return stand_ins[v]

        done: dict[UOp, UOp] = {}
        for n in value.toposort(gate=lambda n: not self.ends(n, root)):
            if n.op is Ops.BUFFER or n.op is Ops.AFTER:
                done[n] = leaf(self.version(n))
            elif self.ends(n, root):
                done[n] = self.stored_view(n, leaf(Version(self.buffer_of[n], 0)))
            else:
                src = tuple([done[s] for s in n.src])
                done[n] = n if src == n.src else n.replace(src=src)
        return done[value], {b: v for v, b in stand_ins.items()}

    def stored_view(self, u: UOp, buffer: UOp) -> UOp:
        """The value of the realised node u in its buffer, in the order of its axes that the plan chooses."""
        order = self.deviations.orders.get(u)
        if order is None:
            return storage_view(buffer, shape_of(u))
        stored = storage_view(buffer, tuple([shape_of(u)[a] for a in order]))
        return permute(stored, inverse_order(order))

    def add_kernel(self, root: UOp, value: UOp, out: Version, why: str, view: Callable[[UOp], UOp] | None = None) -> None:
        """Add the kernel that stores `value` into the buffer of `out`, through the view that `view(buffer)` returns, if given."""
        graph, versions = self.kernel_graph(value, root)
        unique = UOp(Ops.LUNIQUE, dtypes.void, (), "out")
        stand_in = UOp(Ops.BUFFER, out.buffer.dtype, (unique, self.host), out.buffer.arg)
        target = storage_view(stand_in, shape_of(value)) if view is None else view(stand_in)
        constants = frozenset(b for b, (buffer, version) in versions.items() if version == 0 and buffer in self.constants)
        made = part_ast(graph, target, constants, remember=self.remember)
        args = [out if b is stand_in else versions[b] for b in made.buffers]
        self.pending.append(_Pending(made.ast, args, list(made.offsets), 1, name_of(graph), self.origin(root, value), why,
                                     made.variables, root))

    def operands(self, u: UOp) -> list[Version]:
        """The versions that the operands of a CUSTOM_FUNCTION denote."""
        return [self.version_under(s) for s in u.src]

    def version_under(self, u: UOp) -> Version:
        """The version of the buffer that holds u: a BUFFER, an AFTER or a node with a new buffer, perhaps under RESHAPEs."""
        base = base_of(u)
        return self.version(base) if base.op in (Ops.BUFFER, Ops.AFTER) else Version(self.buffer_of[base], 0)

    def add_callback(self, results: list[UOp], why: str) -> None:
        """Add one call of a Python function, for all its results."""
        if not results:
            return
        first = results[0]
        args = [*(Version(self.buffer_of[u], 0) for u in results), *self.operands(first)]
        params = [UOp(Ops.PARAM, b.dtype, (), Param(slot, b.arg)) for slot, (b, _) in enumerate(args)]
        extents = [n for _, shape in (a for arrays in first.arg[1][1:3] for a in arrays) for n in shape if isinstance(n, Dim)]
        variables = tuple(dict.fromkeys(v for n in extents for v in n.expr.walk(Ops.DEFINE_VAR)))
        self.pending.append(_Pending(callback_ast(results, params), args, [0] * len(args), len(results), first.arg[1][0].name,
                                     origin_of(first) or "", why, variables, first))

    def add_library_kernel(self, u: UOp, why: str) -> None:
        """Add the kernel of a library kernel, over the buffers of its operands."""
        out = Version(self.buffer_of[u], 0)
        parts = [self.part_under(s) for s in u.src]
        sizes = [v.buffer.arg if whole else math.prod(shape_of(s)) for s, (v, _, whole) in zip(u.src, parts, strict=True)]
        args = [(out.buffer, out.buffer.arg), *[(v.buffer, size) for (v, _, _), size in zip(parts, sizes, strict=True)]]
        params = [UOp(Ops.PARAM, b.dtype, (), Param(slot, size)) for slot, (b, size) in enumerate(args)]
        name, options = u.arg
        value = UOp(Ops.CUSTOM_FUNCTION, u.dtype, tuple(params[1:]), (name, options, tuple(shape_of(s) for s in u.src)))
        where = UOp(Ops.INDEX, u.dtype, (params[0], UOp.const(dtypes.index, 0)))
        ast = UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (where, value)),))
        self.pending.append(_Pending(ast, [out, *[v for v, _, _ in parts]], [0, *[first for _, first, _ in parts]], 1, name.lower(),
                                     origin_of(u) or "", why, (), u))

    def part_under(self, u: UOp) -> tuple[Version, int, bool]:
        """The version of the buffer that an operand is in, the operand's first element there, and whether the operand is all of it."""
        if is_memory(base_of(u)) or base_of(u) in self.buffer_of:
            return self.version_under(u), 0, True
        part = part_of_memory(u, lambda n: is_memory(n) or n in self.buffer_of)
        assert part is not None     # `normalize` has given every other operand a buffer
        return self.version_under(part[0]), part[1], False

    def add_transfer(self, u: UOp, why: str) -> None:
        """Add the copy of a buffer, or of a contiguous part of one, to another device."""
        base = base_of(u.src[0])
        part = None if base.op in (Ops.BUFFER, Ops.AFTER) or base in self.buffer_of else part_of_memory(u.src[0])
        read, first = (self.version_under(u.src[0]), 0) if part is None else (self.version(part[0]), part[1])
        args = [Version(self.buffer_of[u], 0), read]
        to, source = (UOp(Ops.PARAM, u.dtype, (), Param(slot, args[0].buffer.arg)) for slot in range(2))
        where = UOp(Ops.INDEX, u.dtype, (to, UOp.const(dtypes.index, 0)))
        ast = UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (where, u.replace(src=(source, u.src[1])))),))
        self.pending.append(_Pending(ast, args, [0, first], 1, "copy", origin_of(u) or "", why, (), u))

    def add_calls(self, head: UOp, why: str) -> None:
        """Add the kernels of a call, or of all iterations of a loop."""
        after = tuple(self.version(a) for a in self.programs[head].after)
        known: dict[UOp, tuple[UOp, tuple[int, ...]]] = {}
        kernels: dict[tuple[UOp, tuple[tuple[str, int], ...]], tuple[UOp, tuple[int, ...], tuple[int, ...]]] = {}
        for (call, values), arguments in self.invocations.pop(head):
            if (call.arg, values) not in kernels:
                kernels[call.arg, values] = kernel_of_call(call.arg, values, known)
            ast, slots, offsets = kernels[call.arg, values]
            args = [a if isinstance(a, Version) else Version(self.buffer_of[a], 0) for a in arguments]
            said = ", ".join(f"{name} = {value}" for name, value in values)
            self.pending.append(_Pending(ast, [args[s] for s in slots], list(offsets), len(written_slots(call)), "call",
                                         origin_of(head) or "", f"{why} with {said}" if said else why, after=after))

    def add_assign(self, u: UOp, why: str) -> None:
        if u in self.placed:
            return
        storage, version = self.version_of[u]
        self.add_kernel(u, u.src[1], Version(storage, version), why, partial(view_of, u))
        kernel = self.pending[-1]
        old = [slot for slot, (buffer, _) in enumerate(kernel.args) if slot and buffer is storage]
        if not old:
            return
        if len(old) == 1 and kernel.args[old[0]] == (storage, version - 1):
            slot, regions = old[0], regions_of(kernel.ast)
            if are_disjoint(regions[0].moved(kernel.offsets[0]), regions[slot].moved(kernel.offsets[slot])):
                return
            in_place = merge_slots(kernel.ast, slot) if kernel.offsets[slot] == kernel.offsets[0] else None
            if in_place is not None:
                kernel.ast, slots = canonicalize(in_place)
                rest = [i for i in range(len(kernel.args)) if i != slot]
                kernel.args, kernel.offsets = [kernel.args[rest[s]] for s in slots], [kernel.offsets[rest[s]] for s in slots]
                return
        self.pending.pop()
        # the value reads the buffer that it overwrites, so compute it into a temporary first, then copy it
        temporary = self.new_buffer(u.dtype, storage_size(u), storage)
        self.add_kernel(u, u.src[1], Version(temporary, 0), "the value of an ASSIGN that reads the buffer it writes")
        self.add_kernel(u, storage_view(temporary, shape_of(u)), Version(storage, version), why, partial(view_of, u))

    # -- order ------------------------------------------------------------------------------
    def order(self) -> list[KernelCall]:
        while True:
            deps = self.dependencies()
            sequence = order_of(deps)       # in the graph's order where possible
            waiting = sorted(set(range(len(deps))).difference(sequence))
            if not waiting:
                break
            self.take_snapshot(waiting, deps)
        self.sequence = sequence
        position = {k: i for i, k in enumerate(sequence)}
        calls = []
        for k in sequence:
            p = self.pending[k]
            args, offsets = [v.buffer for v in (*p.writes, *p.reads)], list(p.offsets)
            for slot, buffer in enumerate(args):
                if buffer in self.parts:
                    (args[slot], _), first = self.parts[buffer]
                    offsets[slot] += first
            earlier = tuple(sorted(position[d] for d in deps[k]))
            calls.append(KernelCall(p.ast, tuple(args), tuple(offsets), p.name_hint, p.origin, earlier, p.why, p.variables))
        return calls

    def dependencies(self) -> list[set[int]]:
        """For each pending kernel, the kernels that must run before it."""
        writers: dict[Version, list[int]] = {}
        for i, p in enumerate(self.pending):
            for v in p.writes:
                writers.setdefault(v, []).append(i)
                if v.buffer in self.parts:
                    writers.setdefault(self.parts[v.buffer].whole, []).append(i)
        deps: list[set[int]] = [set() for _ in self.pending]
        for i, p in enumerate(self.pending):
            for v in p.reads:
                deps[i].update(writers.get(v, ()))
                for following in writers.get(Version(v.buffer, v.number + 1), ()):
                    if following != i:
                        deps[following].add(i)
            for buffer, version in p.writes:
                deps[i].update(writers.get(Version(buffer, version - 1), ()))
            for v in p.after:
                deps[i].update(writers.get(v, ()))
        return deps

    def take_snapshot(self, stuck: list[int], deps: list[set[int]]) -> None:
        """Copy a version of a buffer that one kernel in a cycle reads and another one overwrites."""
        written = {v for i in stuck for v in self.pending[i].writes}
        for i in stuck:
            p = self.pending[i]
            for v in p.reads:
                after = Version(v.buffer, v.number + 1)
                if after not in written or after in p.writes:
                    continue
                copy = self.new_buffer(v.buffer.dtype, v.buffer.arg, v.buffer)
                old, new = (v.buffer.replace(src=(UOp(Ops.LUNIQUE, dtypes.void, (), n), self.host)) for n in (0, "out"))
                made = kernel_ast(old, new, remember=self.remember)
                self.pending.append(_Pending(made.ast, [Version(copy, 0) if b is new else v for b in made.buffers], [0, 0], 1, "copy",
                                             p.origin, "the old content of a buffer that is assigned before this is read"))
                for other in stuck:
                    if v in self.pending[other].args[self.pending[other].outs:]:
                        self.pending[other].snapshots[v] = copy
                return
        raise ScheduleError("the graph has a cycle through its ASSIGNs that no copy can break; assign the buffers one after another")


def copies_to(ast: UOp) -> str:
    """The device that a call of a schedule copies a buffer to; "" for a call that is no such copy."""
    value = ast.src[0].src[1] if ast.op is Ops.SINK and ast.src and ast.src[0].op is Ops.STORE else ast
    return str(value.src[1].arg) if value.op is Ops.COPY else ""


def merge_slots(ast: UOp, slot: int) -> UOp | None:
    """Make a kernel with one STORE work in place: replace the PARAM of `slot` by the one that is stored to. None unless every element is
    read only by the iteration that writes it."""
    store, = ast.src
    target = store.src[0]
    nodes = ast.toposort()
    loads = {u for u in nodes if u.op is Ops.LOAD and u.src[0].src[0].arg.slot == slot}
    direct = store.src[1].toposort(gate=lambda n: n.op not in (Ops.STAGE, Ops.REDUCE))
    if not loads <= set(direct) or any(len(u.src) > 1 or u.src[0].src[1] is not target.src[1] for u in loads):
        return None
    old = next(iter(loads)).src[0].src[0]
    # both PARAMs are now one buffer; slots above `slot` move down by one
    moved = {u: u.replace(arg=replace(u.arg, slot=u.arg.slot - 1)) for u in nodes if u.op is Ops.PARAM and u.arg.slot > slot}
    return ast.substitute({**moved, old: target.src[0]})


def is_constant(u: UOp) -> bool:
    """Whether readers should recompute a node instead of reading its buffer: it is a constant, perhaps moved."""
    while u.op in MOVEMENT:
        u = u.src[0]
    return u.op is Ops.CONST


def view_of(assign: UOp, buffer: UOp) -> UOp:
    """The view through which an ASSIGN writes, with `buffer` in place of its storage."""
    chain = []
    node = assign.src[0]
    while node.op is not Ops.BUFFER and node.op is not Ops.AFTER:
        chain.append(node)
        node = node.src[0]
    result = buffer
    for m in reversed(chain):
        result = m.replace(src=(result,))
    return result


def unmoved(layout: UOp, u: UOp, buffer: UOp) -> UOp:
    """The view of `buffer`, which stores `layout`, with the elements in the order of u. Only RESHAPEs and PERMUTEs lead from u to
    `layout`."""
    result, node = storage_view(buffer, shape_of(layout)), layout
    while node is not u:
        result = permute(result, inverse_order(node.arg)) if node.op is Ops.PERMUTE else reshaped(result, shape_of(node.src[0]))
        node = node.src[0]
    return result


def inverse_order(order: Sequence[int]) -> list[int]:
    """The order of axes that takes `order` back."""
    return sorted(range(len(order)), key=order.__getitem__)


def reshaped(u: UOp, shape: tuple[int, ...]) -> UOp:
    """u reshaped to `shape`."""
    return u if shape_of(u) == shape else UOp(Ops.RESHAPE, u.dtype, (u,), shape)


def name_of(value: UOp) -> str:
    """A word for the work of a kernel: attention, conv, gemm, softmax, rows, reduce, gather, elementwise, copy, fill."""
    nodes = value.toposort(gate=lambda n: n.op is not Ops.BUFFER)
    contractions = [u for u in nodes if u.op is Ops.REDUCE_AXIS and is_contraction(u)]
    if len(contractions) > 1:
        return "attention"
    if contractions:
        return "conv" if any(u.op is Ops.WINDOW for u in nodes) else "gemm"
    reductions = [u for u in nodes if is_reduction(u)]
    if reductions:
        if any(u.op is Ops.WINDOW for u in nodes):
            return "pool"
        exponential = any(u.op in (Ops.EXP, Ops.EXP2) for u in nodes)
        return "softmax" if exponential and len(reductions) == 2 else "rows" if len(reductions) > 1 else "reduce"
    if any(u.op is Ops.GATHER for u in nodes):
        return "gather"
    if not reads_memory(value):
        return "fill"
    return "elementwise" if any(u.op not in (*MOVEMENT, Ops.BUFFER) for u in nodes) else "copy"
