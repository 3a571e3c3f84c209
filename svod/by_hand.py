"""Defines `svod.kernel(tensor)`: takes a kernel out of a tensor's graph to inspect it and optimise it by hand (docs/kernels_by_hand.md).

    k = svod.kernel(a @ b)                          # or svod.kernel(f.plans[0], "gemm_0")
    k = k.apply("UPCAST", "o0", 8).apply("UPCAST", "o1", 16)
    print(k.nest())
    print(k.time())
"""
from __future__ import annotations

from collections.abc import Iterable

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.kernel_form import KernelForm
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.callback import functions_of
from svod.core.graph.devices import device_of
from svod.core.graph.shapes import storage_size
from svod.core.graph.storage import base_of
from svod.core.ir.variable import without_binds
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import HOST, Target
from svod.core.schedule.schedule_cache import schedule_of
from svod.errors import ArgumentError, ScheduleError
from svod.prepare import Places, arranged, buffers_under, complete_config, make_unbound_plan, with_constants_turned
from svod.tensor import Tensor
from svod.tune.hand_kernel import HandKernel
from svod.tune.resolved import Resolved, resolve


def kernel(source: Tensor | ExecutionPlan, which: int | str | None = None, *, chain: str = "", constants: Iterable[Tensor] = (),
           config: PrepareConfig | None = None) -> HandKernel:
    """Return the kernel of a tensor, or one of several: `which` is its number, its name, or the beginning of its key. `chain`: opts to
    start with, as text. `constants`: tensors that are weights, as in `prepare`. Nothing is computed.

    A kernel of a plan, `svod.kernel(f.plans[0], "gemm_0")`, starts with the chain and the target that the plan uses for it.

    Raises ScheduleError for a tensor that no kernel computes. Raises ArgumentError, with a list of the kernels, if `which` does not
    identify one, and for a library kernel (a scan, a sort, scatter), which takes no opts."""
    resolved = resolve(complete_config(config))
    if isinstance(source, ExecutionPlan):
        return _of_plan(source, which, chain, resolved)
    if not isinstance(source, Tensor):
        raise ArgumentError(f"svod.kernel takes a tensor that is not computed yet, or a plan, got {type(source).__name__}")
    kernels, targets = _kernels(source, constants, resolved)
    name, found = _chosen(kernels, which, "the tensor is computed by")
    _refuse_library_kernel(name, found)
    k = HandKernel.of(found, targets[name], name, resolved.db)
    return k.apply(chain) if chain else k


def _of_plan(plan: ExecutionPlan, which: int | str | None, chain: str, resolved: Resolved) -> HandKernel:
    """Return a kernel of a plan under `chain`, or, if that is "", under the chain that the plan uses."""
    forms = {k.name: k.form for k in plan.every if isinstance(k.form, KernelForm)}
    name, found = _chosen({name: form.kernel for name, form in forms.items()}, which, "the plan runs")
    _refuse_library_kernel(name, found)
    form = forms[name]
    return HandKernel.of(found, form.target, name, resolved.db).apply(chain or form.chain_text)


def _refuse_library_kernel(name: str, kernel: Kernel) -> None:
    if kernel.library_kernel is not None:
        raise ArgumentError(f"{name} is a library kernel: it has one form and takes no opts; a plan shows its LINEAR and assembly, as in "
                            "t.prepare().kernels[0].asm()")


def _kernels(tensor: Tensor, constants: Iterable[Tensor], resolved: Resolved) -> tuple[dict[str, Kernel], dict[str, Target]]:
    """Return the kernels of a tensor's graph, and their targets. Keys: the name of the first call of the kernel on a device."""
    sink, _, _ = without_binds(graph.sink(tensor.uop))
    fixed = frozenset(base_of(t.uop) for t in constants) & buffers_under([tensor.uop])
    # rearranged constants get empty buffers: nothing is computed here
    sink, fixed = with_constants_turned(arranged(sink, resolved), fixed, lambda nodes: {
        u: graph.buffer(u.dtype, storage_size(u), device_of(u) or HOST) for u in nodes})
    schedule = schedule_of(sink, fixed)
    places = Places(schedule, resolved.target.device)
    unbound, _, _ = make_unbound_plan(schedule, fixed, functions_of(sink), places=places)
    first: dict[tuple[str, str], str] = {}      # (kernel, device) → name
    for name, call in zip(unbound.names, unbound.calls, strict=True):
        if call.kernel in unbound.kernels:      # calls of Python functions have no kernel
            first.setdefault((call.kernel, call.device or places.main), name)
    return ({name: unbound.kernels[key] for (key, _), name in first.items()},
            {name: resolved.target_of(device) for (_, device), name in first.items()})


def _chosen(kernels: dict[str, Kernel], which: int | str | None, what: str) -> tuple[str, Kernel]:
    listed = ", ".join(f"{i}: {name} ({k.key[:12]})" for i, (name, k) in enumerate(kernels.items()))
    if not kernels:
        raise ScheduleError("no kernel computes this tensor: it is in memory, or a constant; build its graph anew from its inputs")
    if which is None and len(kernels) == 1:
        return next(iter(kernels.items()))
    matches = [(name, k) for i, (name, k) in enumerate(kernels.items())
               if which == i or (isinstance(which, str) and (name == which or k.key.startswith(which)))]
    if len({k.key for _, k in matches}) != 1:
        asked = "which one?" if which is None else f"which={which!r} names {len(matches)} of them"
        raise ArgumentError(f"{what} {len(kernels)} kernels, {asked}: {listed}; give a number, a name or a key")
    return matches[0]

