"""A plan before its kernels are compiled, as plain data: its kernels, the buffers they are applied to, and their order.

`prepare` makes it from a schedule, `build_plan` turns it into an ExecutionPlan with any choice of opt chains, and a capture file stores it,
so that `svod-tune` can time the whole plan without the model.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from svod.compile.plan.compiler import Compiled
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.host_item import BufferCopy, HostProgram
from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.plan_parts import BufferKind, PlanBuffer, PreparedKernel, VariableSpec
from svod.compile.plan.running.exchange import exchange_after_run, with_code
from svod.core.graph.buffer import Buffer, aligned_empty
from svod.core.graph.callback import HostCall
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import HOST
from svod.core.schedule.kernel_variables import with_bounds
from svod.core.schedule.regions import regions_of
from svod.errors import LaunchError


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of `size` elements of `dtype`. `device`: the device that holds it; "": the plan's device."""

    dtype: DType
    size: int
    kind: BufferKind
    device: str = ""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One item of the plan: `kernel` is the key of a kernel, a Python function or a copy; `args` has a buffer number per slot. `offsets`:
    per slot, the offset of the PARAM in the buffer, in elements. Calls of one `level` are independent. `variables`: the plan's variables
    for the kernel's v0, v1, …. `device`: the device that runs it; "": the plan's device."""

    kernel: str
    args: tuple[int, ...]
    name: str
    origin: str
    why: str
    level: int
    offsets: tuple[int, ...]
    variables: tuple[VariableSpec, ...] = ()
    device: str = ""


class Named(NamedTuple):
    """A kernel's name, taken from its first call with a name ("": no call has one), and the places in the model that its calls come
    from."""

    name: str
    origins: tuple[str, ...]


def named_kernels(calls: Iterable[Call]) -> dict[str, Named]:
    """Return the name and the origins of each kernel of these calls, by its key."""
    names: dict[str, str] = {}
    origins: dict[str, dict[str, None]] = {}
    for c in calls:
        names[c.kernel] = names.get(c.kernel) or c.name
        origins.setdefault(c.kernel, {}).update({c.origin: None} if c.origin else {})
    return {key: Named(name, tuple(origins[key])) for key, name in names.items()}


@dataclass(frozen=True)
class UnboundPlan:
    """The calls of a plan in an order that can run, sorted by level. `outputs` are buffer numbers in the order of the requested tensors.
    The kernel of a call is a key of `kernels`, `functions` or `copies`."""

    calls: tuple[Call, ...]
    buffers: tuple[BufferSpec, ...]
    outputs: tuple[int, ...]
    kernels: Mapping[str, Kernel]
    functions: Mapping[str, HostCall] = field(default_factory=dict)
    copies: Mapping[str, BufferCopy] = field(default_factory=dict)

    @property
    def native(self) -> UnboundPlan:
        """The part of the plan that consists of kernels, and can be stored as data. The results of functions and of copies from other
        devices are inputs of it."""
        if not self.functions and not self.copies:
            return self
        computed = {c.args[slot] for c in self.calls if c.kernel in self.functions
                    for slot in range(self.functions[c.kernel].stored_results)}
        computed.update(c.args[0] for c in self.calls if c.kernel in self.copies)
        buffers = tuple(replace(b, kind="input") if i in computed and b.kind == "intermediate" else b for i, b in enumerate(self.buffers))
        return UnboundPlan(tuple(c for c in self.calls if c.kernel in self.kernels), buffers, self.outputs, self.kernels)

    def on(self, device: str) -> UnboundPlan:
        """Return the part of `native` that a device runs."""
        calls = tuple(c for c in self.native.calls if c.device == device)
        used = {c.kernel for c in calls}
        return replace(self.native, calls=calls, kernels={key: k for key, k in self.kernels.items() if key in used})

    @property
    def names(self) -> list[str]:
        """The name of each call: its kernel's name and its position in the plan."""
        return [f"{c.name}_{i}" for i, c in enumerate(self.calls)]

    @property
    def counts(self) -> dict[str, int]:
        """The number of calls of each kernel in one run, by kernel key."""
        out: dict[str, int] = {}
        for c in self.calls:
            out[c.kernel] = out.get(c.kernel, 0) + 1
        return out

    def variables_of(self, kernel: str) -> list[tuple[VariableSpec, ...]]:
        """Return the variables of each call of a kernel; [] if it has none."""
        return [c.variables for c in self.calls if c.kernel == kernel and c.variables]


def call_sizes(kernel: Kernel, variables: Sequence[VariableSpec]) -> list[int]:
    """Return, for each slot, the number of elements that a call with these variables accesses, counted from the start of its PARAM."""
    if not variables:
        return [p.arg.size for p in kernel.params]
    return [r.end for r in regions_of(_bounded(kernel, variables))]


def _bounded(kernel: Kernel, variables: Sequence[VariableSpec]) -> UOp:
    """Return a kernel's AST in which its variables have the bounds that they have in a call."""
    return with_bounds(kernel.ast, {f"v{i}": v.bounds for i, v in enumerate(variables)})


def build_plan(unbound: UnboundPlan, compiled: Mapping[str, Compiled], arrays: Sequence[np.ndarray[Any, Any] | None], *,
               threads: int | None = None, planner: PlannerMode = "arena", device: str = HOST,
               storages: Mapping[int, Buffer] | None = None,
               elsewhere: Mapping[str, Mapping[str, Compiled]] | None = None) -> ExecutionPlan:
    """Make the plan that runs `unbound` with the code of each kernel key; `elsewhere`: code by device and key, for calls that name one.
    `arrays`: host memory per buffer; None for intermediates, for inputs that are bound later, and for buffers on a device. `storages`: the
    tensors' memory, by buffer; packed copies of constants are shared with other plans. Raises LaunchError if `unbound` cannot be run with
    this code and memory."""
    storages = storages or {}
    buffers = [PlanBuffer(b.nbytes, b.kind, array, b.dtype, storages.get(i), b.device)
               for i, (b, array) in enumerate(zip(unbound.buffers, arrays, strict=True))]
    kernels = []
    for name, c in zip(unbound.names, unbound.calls, strict=True):
        if c.kernel in unbound.functions:
            program = HostProgram(unbound.functions[c.kernel])
            kernels.append(PreparedKernel(program.spec(len(c.variables)), program, c.args, name, c.kernel, (), "host callback",
                                          "a function of Python", c.origin, c.level, c.why, variables=c.variables, device=c.device))
            continue
        if c.kernel in unbound.copies:
            transfer = unbound.copies[c.kernel]
            kernels.append(PreparedKernel(transfer.spec, transfer, c.args, name, c.kernel, (), "copy", "from device to device", c.origin,
                                          c.level, c.why, tuple(k * transfer.dtype.itemsize for k in c.offsets)))
            continue
        known = (elsewhere or {}).get(c.device, {}) if c.device else compiled
        if c.kernel not in known:
            raise LaunchError(f"call {c.name or '?'} is of kernel {c.kernel[:12]}, which has no code; compiled are {len(known)} kernels")
        code, kernel = known[c.kernel], unbound.kernels[c.kernel]
        sizes = [p.dtype.itemsize for p in kernel.params]
        reached = regions_of(_bounded(kernel, c.variables))
        regions = tuple(r.moved(k, size) for r, k, size in zip(reached, c.offsets, sizes, strict=True))
        offsets = tuple(k * size for k, size in zip(c.offsets, sizes, strict=True))
        item = PreparedKernel(code.spec, code.loaded, c.args, name, c.kernel, (), "", "", c.origin, c.level, c.why, offsets, regions,
                              c.variables, device=c.device)
        kernels.append(with_code(item, code))
    plan = ExecutionPlan(kernels, buffers, unbound.outputs, threads=threads, planner=planner, device=device)
    if own := {key: code.own for key, code in compiled.items() if code.own is not None}:
        exchange_after_run(plan, own)
    return plan


def synthetic_arrays(unbound: UnboundPlan, seed: int = 0) -> list[np.ndarray[Any, Any] | None]:
    """Allocate memory for every buffer that the planner does not place, filled with small values that keep models finite, to time captured
    plans.

    Integers that kernels use as indices stay inside their bounds."""
    rng = np.random.default_rng(seed)
    bounds: dict[int, tuple[int, int]] = {}
    for c in unbound.calls:
        for p, arg in zip(unbound.kernels[c.kernel].params, c.args, strict=True):
            if p.arg.vmax is not None:
                low, high = bounds.get(arg, (p.arg.vmin or 0, p.arg.vmax))
                bounds[arg] = max(low, p.arg.vmin or 0), min(high, p.arg.vmax)
    arrays: list[np.ndarray[Any, Any] | None] = []
    for i, b in enumerate(unbound.buffers):
        if b.kind == "intermediate":
            arrays.append(None)
            continue
        a = aligned_empty(b.size, b.dtype)
        if b.kind == "output":
            a.view(np.uint8)[:] = 0
        elif b.dtype.is_float and b.dtype.bits >= 32:
            a[:] = rng.standard_normal(b.size, dtype=np.float32) * 0.05
        elif b.dtype.name == "float16":
            a[:] = (rng.standard_normal(b.size, dtype=np.float32) * 0.05).astype(np.float16)
        elif b.dtype.name == "bfloat16":
            a[:] = ((rng.standard_normal(b.size, dtype=np.float32) * 0.05).view(np.uint32) >> 16).astype(np.uint16)
        else:
            low, high = bounds.get(i, (0, 1))
            a[:] = rng.integers(low, high + 1, b.size)
        arrays.append(a)
    return arrays
