"""The choice which convolutions of a graph are computed by Fourier transforms (`svod.core.convolution.by_fourier`), before it is scheduled.

    conv → rough cycles of each block length → schedules of the best ones, and of the direct form → the predicted cycles of their kernels

The transformed form is taken if it is predicted to be faster by ALGORITHM_FACTOR, as every algorithm. It rounds otherwise, so the policy
"same" has none, and it adds transformed weights to the constants of a plan, which `PrepareConfig.transformed_mb` limits.
"""
from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Mapping
from math import inf, prod
from typing import NamedTuple

from svod.compile.plan.compiler import Compiler
from svod.core.convolution.by_fourier import ConvolutionSizes, Lengths, Transformed, by_fourier, sizes_of, table_of
from svod.core.convolution.price import block_lengths, library_cycles, most_direct_cycles, rough_cycles
from svod.core.cost.sketch import ALGORITHM_FACTOR
from svod.core.graph.callback import functions_of
from svod.core.graph.channels import Convolution, convolution_of, with_values
from svod.core.graph.devices import device_of
from svod.core.graph.graph import buffer, contiguous, sink, storage_view
from svod.core.graph.library_kernel import has_fourier
from svod.core.graph.shapes import shape_of
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import HOST, SAME
from svod.core.schedule.schedule import copies_to, create_schedule
from svod.system.forksafe import remake_after_fork
from svod.system.quantities import count
from svod.tune.plans.transformed import MEGABYTE
from svod.tune.resolved import Resolved

log = logging.getLogger("svod.tune")

SCHEDULED = 2           # block lengths whose kernels are priced one by one
_Key = tuple[object, ...]

_chosen: dict[_Key, Lengths | None] = {}
_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


class Rewritten(NamedTuple):
    """A graph with convolutions by transforms. `weights`: the nodes that hold transformed weights; `tables`: BUFFERs of roots of unity,
    which are constants."""

    sink: UOp
    weights: frozenset[UOp]
    tables: frozenset[UOp]


def with_transforms(graph: UOp, constants: frozenset[UOp], resolved: Resolved) -> Rewritten:
    """Rewrite the convolutions of a graph for which transforms are predicted to be faster. `constants`: BUFFERs that are weights."""
    config, target = resolved.config, resolved.target
    if target.has_groups or target.numerics == SAME or config.noopt or config.capture_device is not None:
        return Rewritten(graph, frozenset(), frozenset())
    room = None if config.transformed_mb is None else config.transformed_mb * MEGABYTE
    lengths: dict[UOp, tuple[ConvolutionSizes, Lengths]] = {}
    left = 0
    for u in graph.toposort():
        c = convolution_of(u)
        sizes = None if c is None or device_of(u) not in (None, HOST) else sizes_of(u, c)
        if c is None or sizes is None:
            continue
        found = _choose(u, c, sizes, _is_constant(c.weight, constants), resolved.compiler)
        added = 0 if found is None else _added_bytes(u, sizes, found)
        if found is None:
            continue
        if room is None or added <= room:
            lengths[u] = sizes, found
            room = None if room is None else room - added
        else:
            left += 1
    if left:
        log.warning("%s of a plan %s directly, as transformed weights would take more memory than transformed_mb allows "
                    "(SVOD_TRANSFORMED_MB)", count(left, "convolution"), "compute" if left > 1 else "computes")
    return _rewritten(graph, lengths) if lengths else Rewritten(graph, frozenset(), frozenset())


def _rewritten(graph: UOp, lengths: Mapping[UOp, tuple[ConvolutionSizes, Lengths]]) -> Rewritten:
    done: dict[UOp, UOp] = {}
    weights: dict[UOp, None] = {}
    tables: set[UOp] = set()
    for u in graph.toposort():
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if u in lengths:
            c = convolution_of(node)
            assert c is not None
            made = by_fourier(node, c, *lengths[u])
            for n in made.value.toposort(gate=lambda n: n not in done):
                inherit_origin(n, u)
            node = made.value
            weights[made.weights] = None
            tables.update(table_of(n, inverse, u.dtype) for n in lengths[u][1] for inverse in (False, True))
        elif node is not u:
            inherit_origin(node, u)
        done[u] = node
    return Rewritten(done[graph], frozenset(weights), frozenset(tables))


def _is_constant(weight: UOp, constants: frozenset[UOp]) -> bool:
    return constants.issuperset(weight.walk(Ops.BUFFER)) and not functions_of(weight)


def _added_bytes(u: UOp, z: ConvolutionSizes, lengths: Lengths) -> int:
    """Bytes by which transformed weights are larger than the weights."""
    per_frequency = 4 if z.sums_channels else 2
    return z.groups * z.inputs * z.outputs * (per_frequency * prod(lengths) - prod(z.taps)) * u.dtype.itemsize


# -- the choice of one convolution ---------------------------------------------------------------------
def _choose(u: UOp, c: Convolution, z: ConvolutionSizes, is_constant: bool, compiler: Compiler) -> Lengths | None:
    """The block lengths of the transformed form of a convolution; None if the direct form is to be taken."""
    key = z, c.windows.src[0].arg if c.windows.src[0].op is Ops.PAD else None, shape_of(c.image), u.dtype, is_constant, compiler.target.key
    with _lock:
        if key in _chosen:
            return _chosen[key]
    rough = {n: rough_cycles(z, n, is_constant, u.dtype, compiler.target) for n in block_lengths(z)}
    found = None
    if min(rough.values(), default=inf) * ALGORITHM_FACTOR < most_direct_cycles(z, u.dtype, compiler.target):
        name = hashlib.blake2b(f"transforms {key}".encode(), digest_size=16).hexdigest()
        kept = compiler.kept(name)
        if isinstance(kept, list) and len(kept) in (0, len(z.taps)) and all(isinstance(n, int) and has_fourier(n) for n in kept):
            found = tuple(kept) or None
        else:
            found = _cheapest(u, c, z, rough, is_constant, compiler)
            compiler.keep(name, list(found or ()))
    with _lock:
        return _chosen.setdefault(key, found)


def _cheapest(u: UOp, c: Convolution, z: ConvolutionSizes, rough: Mapping[Lengths, float], is_constant: bool,
              compiler: Compiler) -> Lengths | None:
    """The block lengths of the transformed form by the predicted cycles of its kernels and of the direct form's; None: that is taken.
    `rough`: the rough cycles of all block lengths."""
    alone = _alone(u, c)
    own = convolution_of(alone)
    assert own is not None
    weights = frozenset(own.weight.walk(Ops.BUFFER)) if is_constant else frozenset()
    direct = predicted_cycles(alone, weights, compiler)
    best = [n for n in sorted(rough, key=lambda n: (rough[n], n))[:SCHEDULED] if rough[n] * ALGORITHM_FACTOR < direct]
    if not best:
        return None
    cycles = {n: _transformed_cycles(by_fourier(alone, own, z, n), is_constant, compiler) for n in best}
    fastest = min(best, key=lambda n: cycles[n])
    log.info("a convolution of %s with %s taps: predicted %.3g cycles, and %.3g by transforms of blocks of %s", shape_of(c.image), z.taps,
             direct, cycles[fastest], "×".join(map(str, fastest)))
    return fastest if cycles[fastest] * ALGORITHM_FACTOR < direct else None


def _alone(u: UOp, c: Convolution) -> UOp:
    """The convolution of an image and weights that are in memory."""
    memory = {n: storage_view(buffer(n.dtype, prod(shape_of(n))), shape_of(n)) for n in (c.image, c.weight)}
    return with_values(u, memory)


def _transformed_cycles(made: Transformed, is_constant: bool, compiler: Compiler) -> float:
    """The predicted cycles of a run of a transformed convolution."""
    if not is_constant:
        return predicted_cycles(made.value, frozenset(), compiler)
    held = buffer(made.weights.dtype, prod(shape_of(made.weights)))
    value = with_values(made.value, {made.weights: storage_view(held, shape_of(made.weights))})
    return predicted_cycles(value, frozenset([held]), compiler)


def predicted_cycles(value: UOp, constants: frozenset[UOp], compiler: Compiler) -> float:
    """The predicted cycles of the kernels that compute a value, each with the heuristic's chain."""
    calls = create_schedule(sink(contiguous(value)), constants).calls
    return sum(_kernel_cycles(Kernel(call.ast), compiler) for call in calls if not copies_to(call.ast))


def _kernel_cycles(kernel: Kernel, compiler: Compiler) -> float:
    target = compiler.target
    if kernel.library_kernel is not None:
        return library_cycles(kernel.library_kernel, target)
    return compiler.backend.cost(apply_opts(Scheduler(kernel, target), compiler.heuristic(kernel))).cycles

