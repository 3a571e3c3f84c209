"""Chains that did well on relatives of a kernel, re-derived for it: seeds of its search, and candidates where nothing is searched.

    the same structure with other extents, on the same target       gemm 512³ for gemm 768×512×2048
    the same kernel on a similar target                             two threads for eight

Chains name axes, which relatives share. An amount that does not fit here becomes the nearest one that does: the whole axis where it is
longer than the axis, a divisor that is near, as many threads as there are. An opt that fits in no way is left out. Nothing is used because
a relative used it: the caller measures.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from svod.compile.backend import backend_named
from svod.core.cost.op_count import count_operations
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target, parse_key, threads_of
from svod.core.schedule.family import family_key
from svod.errors import KernelOptError
from svod.tune.db import TuningDB, Winner
from svod.tune.db.records import Chain
from svod.tune.measure.slices import kernel_bytes
from svod.tune.search.actions import WHOLE, divisors, wasted

MOST_RELATIVES = 8      # kernels and targets whose chains are re-derived, the nearest first
OF_EACH = 2             # chains of one relative
MOST_SEEDS = 6          # re-derived chains that are proposed, those with the best predictions
NEAR = 1.5              # An amount may become a divisor within this factor.
MOST_AMOUNTS = 4        # amounts that are tried in place of one that does not fit


def seeds_of_relatives(base: Scheduler, db: TuningDB, alike: Callable[[str, Target], bool] | None, *,
                       shipped: bool = True) -> list[Scheduler]:
    """The states of an untouched kernel that the chains of its relatives lead to, the best prediction first. `alike`: whether the target
    with a key is one whose chains for this kernel count as well (`is_similar`, `is_compatible`); None: no other target's do. `shipped`:
    whether kernels that only ship with svod are relatives."""
    cost = backend_named(base.target.device).cost
    states: dict[bytes, Scheduler] = {}
    for winner in _winners_of_relatives(base, db, alike, shipped):
        for state in derived(base, winner.chain, threads_of(winner.target)):
            states.setdefault(state.digest, state)
    if not states:
        return []
    for known in (base, backend_named(base.target.device).heuristic(base)):
        states.pop(known.digest, None)
    predicted: list[tuple[float, bytes]] = []
    for digest, state in states.items():
        try:
            predicted.append((cost(state).cycles, digest))
        except KernelOptError:      # its opts are legal one by one, and not together
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
    flops, moved = work_of(base)
    nearest = sorted(family.values(), key=lambda k: (abs(math.log(k.flops / flops)) + abs(math.log(k.bytes / moved)), k.kernel))
    for k in nearest[:MOST_RELATIVES]:
        yield from (w for w in db.ranking(k.kernel, target.key)[:OF_EACH] if not w.own)


def work_of(base: Scheduler) -> tuple[float, float]:
    """Operations and least bytes of one run of a kernel, at least 1 each: what tells how near relatives are."""
    return max(1.0, float(count_operations(base.kernel.ast).flops)), max(1.0, float(kernel_bytes(base.kernel)))


def is_similar(key: str, target: Target) -> bool:
    """Whether chains for the target with this key are worth trying on `target`: the same architecture and kind of device."""
    theirs, ours = parse_key(key), parse_key(target.key)
    return theirs.get("architecture") == ours["architecture"] and _device_of(theirs) == _device_of(ours)


def is_compatible(key: str, target: Target) -> bool:
    """Whether the target with this key differs from `target` in its name and its number of threads alone: same instructions and caches."""
    theirs, ours = parse_key(key), parse_key(target.key)
    return all(theirs.get(name) == ours[name] for name in ours if name not in ("CPU", "threads"))


def _device_of(fields: dict[str, str]) -> set[str]:
    return {f for f in fields.get("features", "").split(",") if f.startswith("device=")}


def _distance(key: str, target: Target) -> int:
    theirs, ours = parse_key(key), parse_key(target.key)
    return sum(theirs.get(name) != value for name, value in ours.items())


# -- re-deriving a chain ---------------------------------------------------------------------------------------------------
def derived(base: Scheduler, chain: Chain, threads: int | None = None) -> Iterator[Scheduler]:
    """The states that a relative's chain leads to: with its amounts where they fit, and with amounts that divide the extents. `threads`: of
    the relative's target; an opt that takes all of them takes all that are here."""
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
    """The divisors of an extent above 1, the nearest to `amount` first."""
    return sorted((d for d in divisors(extent) if d > 1), key=lambda d: (abs(math.log(d / amount)), d))
