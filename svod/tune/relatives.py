"""Winning chains of related kernels, adapted to a kernel: seeds of its search, and candidates where nothing is searched.

    the same structure with other extents, on the same target       a chain of gemm 512³ for gemm 768×512×2048
    the same kernel on a similar target                             a chain for two threads on a machine with eight
    the same kernel in a lock file, for a compatible target         a container with another number of cores

Chains name axes, and related kernels have the same axes. An amount that does not fit becomes the nearest one that does: the whole axis
if the amount is larger, a divisor of the extent that is near, or the number of this machine's threads. An opt that fits with no amount is
left out. The caller measures the chains before it uses them.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from svod.compile.backend import Backend
from svod.core.cost.op_count import count_operations
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target, parse_key, threads_of
from svod.core.schedule.canonical import AST_REVISION
from svod.core.schedule.family import family_key
from svod.errors import KernelOptError
from svod.tune.db import KernelRecord, TuningDB, Winner
from svod.tune.db.records import Chain
from svod.tune.lock import Locked
from svod.tune.search.actions import WHOLE, divisors, wasted

MOST_RELATIVES = 8      # most related kernels, and most similar targets, whose chains are adapted; the nearest are taken
OF_EACH = 2             # most chains of one related kernel or target
MOST_SEEDS = 6          # most adapted chains that are proposed; those with the best predictions are taken
NEAR = 1.5              # An amount that does not divide the extent may be replaced by a divisor within this factor.
MOST_AMOUNTS = 4        # most divisors that are tried instead of an amount that does not apply


def seeds_of_relatives(base: Scheduler, db: TuningDB, backend: Backend, alike: Callable[[str, Target], bool] | None, *,
                       shipped: bool = True, locked: Iterable[Locked] = ()) -> list[Scheduler]:
    """The states of a kernel under the adapted chains of its relatives, the best prediction of `backend` first. `base`: its state
    without opts. `alike`: a predicate on the key of another target, true if the kernel's chains for that target are used (`is_similar`,
    `is_compatible`); None: chains for other targets are not used. `shipped`: whether kernels that only ship with svod count as
    relatives. `locked`: the kernel's lines of a lock file for compatible targets."""
    states: dict[bytes, Scheduler] = {}
    chains = [(tuple(tuple(o.to_json()) for o in line.chain), line.target)
              for line in sorted(locked, key=lambda line: (_distance(line.target, base.target), line.target))[:MOST_RELATIVES]]
    for chain, target in (*chains, *((w.chain, w.target) for w in _winners_of_relatives(base, db, alike, shipped))):
        for state in derived(base, chain, threads_of(target)):
            states.setdefault(state.digest, state)
    if not states:
        return []
    for known in (base, backend.heuristic(base)):
        states.pop(known.digest, None)
    predicted: list[tuple[float, bytes]] = []
    for digest, state in states.items():
        try:
            predicted.append((backend.cost(state).cycles, digest))
        except KernelOptError:      # the chain's opts are legal one by one, but not together
            continue
    return [states[digest] for _, digest in sorted(predicted)[:MOST_SEEDS]]


def _winners_of_relatives(base: Scheduler, db: TuningDB, alike: Callable[[str, Target], bool] | None, shipped: bool) -> Iterator[Winner]:
    kernel, target = base.kernel, base.target
    if alike is not None:
        theirs = (t for t in db.targets_of(kernel.key) if t != target.key and alike(t, target))
        for t in sorted(theirs, key=lambda t: (_distance(t, target), t))[:MOST_RELATIVES]:
            yield from db.ranking(kernel.key, t)[:OF_EACH]
    related = db.family(family_key(kernel.ast), shipped=shipped)
    family = {k.kernel: k for k in related if k.kernel != kernel.key and k.flops > 0 and k.bytes > 0}
    if not family:
        return
    # the nearest kernels are those with the most similar numbers of operations and of bytes
    flops, moved = max(1.0, float(count_operations(kernel.ast).flops)), max(1.0, float(kernel.nbytes))
    nearest = sorted(family.values(), key=lambda k: (abs(math.log(k.flops / flops)) + abs(math.log(k.bytes / moved)), k.kernel))
    for k in nearest[:MOST_RELATIVES]:
        yield from (w for w in db.ranking(k.kernel, target.key)[:OF_EACH] if not w.own)


def kernel_record(kernel: Kernel, name: str) -> KernelRecord:
    """The database record that describes a kernel. Searches of related kernels find the kernel by it."""
    return KernelRecord(kernel.key, name, ast_to_data(kernel.ast), AST_REVISION, family_key(kernel.ast),
                        float(count_operations(kernel.ast).flops), float(kernel.nbytes))


def is_similar(key: str, target: Target) -> bool:
    """Whether chains for the target with this key are worth trying on `target`: the same architecture and kind of device."""
    theirs, ours = parse_key(key), parse_key(target.key)
    return theirs.get("architecture") == ours["architecture"] and _device_of(theirs) == _device_of(ours)


def is_compatible(key: str, target: Target) -> bool:
    """Whether the target with this key differs from `target` only in the CPU's name and the number of threads, and so has the same
    instructions and caches."""
    theirs, ours = parse_key(key), parse_key(target.key)
    return all(theirs.get(name) == ours[name] for name in ours if name not in ("CPU", "threads"))


def _device_of(fields: dict[str, str]) -> set[str]:
    return {f for f in fields.get("features", "").split(",") if f.startswith("device=")}


def _distance(key: str, target: Target) -> int:
    theirs, ours = parse_key(key), parse_key(target.key)
    return sum(theirs.get(name) != value for name, value in ours.items())


# -- re-deriving a chain ---------------------------------------------------------------------------------------------------
def derived(base: Scheduler, chain: Chain, threads: int | None = None) -> Iterator[Scheduler]:
    """The two states that a relative's chain leads to: one with its own amounts where they fit, one with amounts that divide the extents.
    `threads`: the threads of the relative's target; a THREAD opt that uses all of them gets all threads of this target."""
    opts = []
    for data in chain:
        try:
            opt = Opt.from_json(list(data))
        except KernelOptError:
            continue
        if opt.op == "THREAD" and threads is not None and opt.arg == threads:
            opt = opt._replace(arg=base.target.threads)
        opts.append(opt)
    for snapped in (False, True):
        state = base
        for opt in opts:
            state = _fitted(state, opt, snapped)
        yield state


def _fitted(state: Scheduler, opt: Opt, snapped: bool) -> Scheduler:
    """The state after an opt, with the first amount that applies; unchanged where none does."""
    for amount in _amounts(state, opt, snapped):
        try:
            return apply_opt(state, opt._replace(arg=amount))
        except KernelOptError:
            continue
    return state


def _amounts(state: Scheduler, opt: Opt, snapped: bool) -> Iterable[object]:
    """The arguments to try for an opt, the first choice first."""
    extent = next((r.extent for r in state.rows if r.name == opt.axis), 0)
    amount = opt.arg
    if not isinstance(amount, int) or isinstance(amount, bool) or amount == WHOLE or extent < 2:
        return [amount]
    if amount >= extent:
        return [amount, WHOLE, *_near(extent, extent)[:MOST_AMOUNTS]]
    near = _near(amount, extent)
    fitting = [d for d in near if 1 / NEAR <= d / amount <= NEAR] if snapped and wasted(extent, amount) > 1 else []
    return [*fitting, amount, *near[:MOST_AMOUNTS]]


def _near(amount: int, extent: int) -> list[int]:
    """The divisors of an extent, without 1, the nearest to `amount` first."""
    return sorted((d for d in divisors(extent) if d > 1), key=lambda d: (abs(math.log(d / amount)), d))
