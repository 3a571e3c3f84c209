"""A limit of the memory by which algorithms make the constants of a plan larger.

Taps that WINOGRAD(out, 4) transforms are four times as large as those of a 3×3 convolution. Where `PrepareConfig.transformed_mb` does not
allow all of them, the kernels that need most have the best chain without an algorithm instead, until the others fit. Each call of a kernel
transforms constants of its own; calls with the same constants share them.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping

from svod.compile.plan.compiler import Chain, Choice
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.core.kernel.apply import algorithm_of, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest, stored_bytes
from svod.core.kernel.placement import is_computed_once
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.system.quantities import count, digits
from svod.tune.resolved import Resolved

log = logging.getLogger("svod")

MEGABYTE = 1 << 20


def added_bytes(kernel: Kernel, chain: Chain, target: Target) -> int:
    """Bytes by which a chain with an algorithm makes the constants of a kernel larger; 0 for other chains."""
    if not algorithm_of(chain):
        return 0
    state = apply_opts(Scheduler(kernel, target), chain)
    nest = loop_nest(state)
    packed, read = 0, set[int]()
    for s, stage in nest.stages.items():
        if stage.layout is not None and is_computed_once(state, nest.placement, s):
            packed += stage.layout.size * stored_bytes(state, nest.layouts, s)
            read |= {n.arg for n in stage.r.nodes if n.kind == "load"}
    originals = sum([int(kernel.params[slot].arg.size) * kernel.params[slot].dtype.itemsize for slot in read])
    return max(0, packed - originals)


def constants_of(unbound: UnboundPlan, key: str) -> set[tuple[tuple[int, int], ...]]:
    """The different constants that the calls of a kernel read, each as its buffers with the offsets in them."""
    return {tuple([(b, offset) for b, offset in zip(c.args, c.offsets, strict=True) if unbound.buffers[b].kind == "constant"])
            for c in unbound.calls if c.kernel == key}


def within_limit(unbound: UnboundPlan, choices: Mapping[str, Choice], resolved: Resolved) -> dict[str, Choice]:
    """The choices for a plan whose transformed constants take no more than the limit; explicit choices stay as they are. One warning says
    how many kernels compute directly, as their constants would take too much."""
    limit, target = resolved.config.transformed_mb, resolved.compiler.target
    if limit is None:
        return dict(choices)
    added = {key: added_bytes(unbound.kernels[key], choice.chain, target) * len(constants_of(unbound, key))
             for key, choice in choices.items() if choice.source != "explicit"}
    total, found = sum(added.values()), dict(choices)
    wanted = total
    for key in sorted(added, key=lambda key: (-added[key], key)):
        if total <= limit * MEGABYTE:
            break
        total -= added[key]
        found[key] = direct_choice(unbound.kernels[key], resolved)
    changed = sum(found[key] is not choices[key] for key in found)
    if changed:
        log.warning("%s of a plan %s directly: with transformed constants all of them would take %s MB more, and transformed_mb is %g "
                    "(SVOD_TRANSFORMED_MB)", count(changed, "kernel"), "compute" if changed > 1 else "computes",
                    digits(wanted / MEGABYTE), limit)
    return found


def direct_choice(kernel: Kernel, resolved: Resolved) -> Choice:
    """The choice of the sketch without an algorithm that is predicted to be the fastest; the kernel as it is, if there is none."""
    backend, base = resolved.compiler.backend, Scheduler(kernel, resolved.compiler.target)
    direct = [state for state in backend.sketches(base) if not algorithm_of(state.applied_opts)]
    best = min(direct, key=lambda state: backend.cost(state).cycles, default=base)
    return Choice(best.applied_opts, "heuristic", "transformed constants would take more memory than transformed_mb allows")
