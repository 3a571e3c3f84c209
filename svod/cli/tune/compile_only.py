"""svod-tune --compile-only: compiles every kernel's heuristic and sketches for a device, which this machine need not have."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from svod.compile.backend import Device
from svod.compile.lower.library import lower_library_kernel
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.unbound_plan import Named, named_kernels
from svod.compile.resources import PhaseResources, least_occupancy, most
from svod.core.kernel.chain_text import AS_IT_IS, chain_text
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError, SvodError
from svod.system.quantities import count, percent
from svod.system.tables import text_table
from svod.tune.capture import Capture

SHOWN = 8       # digits of a key that tables show


@dataclass(frozen=True)
class CompiledState:
    """A compiled state of a kernel, with the resources that the device's compiler reports. `cycles`: the cost model's prediction, None for
    a library kernel."""

    source: str                 # heuristic, sketch or library
    chain: str
    cycles: float | None
    resources: tuple[PhaseResources, ...]
    error: str | None = None


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel of the capture with its compiled states, the fastest by prediction first."""

    key: str
    name: str
    origins: tuple[str, ...]
    calls: int
    states: tuple[CompiledState, ...]

    def to_data(self) -> dict[str, Any]:
        """The kernel and its states as plain data for JSON."""
        states = [{"source": s.source, "chain": s.chain, "predicted_cycles": s.cycles, "resources": [r.to_data() for r in s.resources],
                   "error": s.error} for s in self.states]
        return {"key": self.key, "name": self.name, "origins": list(self.origins), "calls": self.calls, "states": states}


def compile_kernels(captured: Capture, device: Device, target: Target, only: Sequence[str] = ()) -> list[CompiledKernel]:
    """Compile every kernel of a capture, or those whose key begins with or whose name contains an entry of `only`. Nothing is stored."""
    calls: dict[str, int] = {}
    for plan in captured.plans:
        for call in plan.unbound.calls:
            calls[call.kernel] = calls.get(call.kernel, 0) + plan.runs
    named = named_kernels(c for plan in captured.plans for c in plan.unbound.calls)
    found = []
    for key, kernel in captured.kernels.items():
        name, origins = named.get(key, Named("", ()))
        if not only or any(key.startswith(o) or o in (name or "kernel") for o in only):
            found.append(CompiledKernel(key, name or "kernel", origins, calls.get(key, 0), _states(kernel, device, target)))
    return found


def _states(kernel: Kernel, device: Device, target: Target) -> tuple[CompiledState, ...]:
    if kernel.library_kernel is not None:
        try:
            return (_compiled("library", "", None, lower_library_kernel(kernel, target), device, target),)
        except SvodError as e:
            return (CompiledState("library", "", None, (), str(e)),)
    base = Scheduler(kernel, target)
    best = device.backend.heuristic(base)
    states = {s.digest: s for s in (best, *device.backend.sketches(base))}
    out = []
    for s in states.values():
        source = "heuristic" if s.digest == best.digest else "sketch"
        chain, cycles = chain_text(s.applied_opts), device.backend.cost(s).cycles
        try:
            out.append(_compiled(source, chain, cycles, lower(s), device, target))
        except KernelOptError:      # opts that contradict each other: a search drops such a state, too
            if source == "heuristic":
                raise
        except SvodError as e:
            out.append(CompiledState(source, chain, cycles, (), str(e)))
    return tuple(sorted(out, key=lambda s: s.cycles or 0.0))


def _compiled(source: str, chain: str, cycles: float | None, program: Program, device: Device, target: Target) -> CompiledState:
    binary = device.pair.compile(device.pair.render(program, target), target)
    return CompiledState(source, chain, cycles, device.pair.resources(binary, program.spec, target))


def compiled_table(kernels: Sequence[CompiledKernel], target: Target, width: int) -> list[str]:
    """The lines of a table with a row per kernel: the number of its states, the resources of the state predicted fastest, and the numbers
    of states that spill registers and that the compiler refused."""
    rows = []
    for k in kernels:
        first = k.states[0]
        spilling = sum(bool(most(s.resources, "spill_stores")) for s in k.states)
        refused = sum(s.error is not None for s in k.states)
        needs = [*(_word(most(first.resources, what)) for what in ("registers", "shared", "spill_stores")),
                 percent(least_occupancy(first.resources))]
        rows.append((f"{k.name} {k.key[:SHOWN]}", str(k.calls), str(len(k.states)), *needs, str(spilling), str(refused)))
    states = sum(len(k.states) for k in kernels)
    errors = [f"{k.name} {k.key[:SHOWN]}, {s.chain or AS_IT_IS}: {s.error}" for k in kernels for s in k.states if s.error is not None]
    header = ("kernel", "calls", "states", "registers", "shared", "spilled", "occupancy", "states that spill", "refused")
    said = "registers, bytes of shared memory and of spills, and occupancy are those of the state predicted fastest"
    if target.has_groups and all(r.registers is None for k in kernels for s in k.states for r in s.resources):
        said = "nothing here makes machine code for this device (for CUDA ptxas does), so registers and spills are not known"
    return [*text_table(header, rows, right=header[1:], shrink=("kernel",), width=width), "",
            f"compiled {count(states, 'state')} of {count(len(kernels), 'kernel')}; {said}", *errors]


def _word(figure: int | None) -> str:
    return "–" if figure is None else str(figure)
