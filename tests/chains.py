"""Random chains of opts, legal and illegal, for tests of states, lowering and machine code.

Every proposal is drawn from what the state offers (its rows, its stages, amounts around its extents and vector widths), so that most
are legal and all legal places are reached; a share is nonsense on purpose: wrong kinds, names that are gone, amounts of another axis.
"""
from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

from svod.core.kernel.apply import apply_opt
from svod.core.kernel.scheduler import INLINE, LOOP, ROOT, UPCAST, Opt, Scheduler
from svod.errors import KernelOptError

AMOUNTS = (2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 48, 64)
THREADS = (0, 2, 3, 4, 5, 8, 9, 12, 16)        # numbers of threads that share an axis; 0: one thread for each of its positions
MAX_EXPANDED = 1500     # positions of one innermost body, all rows that become straight-line code: keeps programs readable and tests short
WEIGHTS = {"UPCAST": 6, "UNROLL": 3, "LANES": 3, "THREAD": 2, "TILE": 4, "ORDER": 3, "SWAP": 2, "STAGE": 6, "INLINE": 1, "PADTO": 2,
           "STREAM": 1}


def amount(rng: random.Random, extent: int) -> int:
    """An amount for an axis of this extent: a divisor, a vector width, the whole extent, or any number."""
    kind = rng.random()
    if kind < 0.35:
        divisors = [d for d in range(2, extent + 1) if extent % d == 0]
        if divisors:
            return rng.choice(divisors)
    if kind < 0.8:
        return rng.choice(AMOUNTS)
    return 0 if kind < 0.9 else rng.randint(1, extent + 1)


def random_opt(rng: random.Random, state: Scheduler) -> Opt:
    """A random opt, not always legal."""
    op = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if rng.random() < 0.03:
        return _nonsense(rng, state, op)
    stages = [s.name for s in state.kernel.stages if not s.is_output] or ["out"]
    loops = [r for r in state.rows if r.role == LOOP and _has_loops(state, r.axis)]
    wide = [r for r in loops if r.extent > 1] or loops
    reduce = [r for r in wide if state.kernel.axes[r.axis].kind == "r"] or wide
    if not wide:    # a scalar has no axes
        return _nonsense(rng, state, op) if op != "STREAM" else Opt(op, "out")
    row = rng.choice(reduce if op == "UNROLL" else wide)
    if op in ("UPCAST", "UNROLL", "TILE"):
        return Opt(op, row.name, amount(rng, row.extent))
    if op == "PADTO":
        return Opt(op, row.name, rng.choice(AMOUNTS))
    if op == "THREAD":
        out = [r for r in wide if state.kernel.stages[state.kernel.axes[r.axis].stage].is_output] or wide
        return Opt(op, rng.choice(reduce if rng.random() < 0.3 else out).name, rng.choice((2, 3, 4, 9, 12)))
    if op == "LANES":
        upcast = [r for r in state.rows if r.role == UPCAST] or [row]
        return Opt(op, rng.choice(upcast).name)
    if op == "SWAP":
        return Opt(op, row.name, rng.choice(wide).name)
    if op == "ORDER":
        stage = rng.choice(state.kernel.stages)
        names = [state.rows[i].name for i in state.order[stage.index]]
        rng.shuffle(names)
        return Opt(op, stage.name, tuple(names[:rng.randint(2, max(2, len(names)))]))
    if op == "STAGE":
        return Opt(op, rng.choice(stages), ROOT if rng.random() < 0.25 else rng.choice(loops).name)
    if op == "INLINE":
        return Opt(op, rng.choice(stages))
    return Opt(op, "out")


def _has_loops(state: Scheduler, axis: int) -> bool:
    stage = state.kernel.stages[state.kernel.axes[axis].stage]
    return state.place[stage.index] != INLINE and (stage.is_output or stage.has_reduce)


def _nonsense(rng: random.Random, state: Scheduler, op: str) -> Opt:
    """An opt of the wrong kind: unknown axes, arguments of other types, opts of other targets."""
    names = [r.name for r in state.rows] + [s.name for s in state.kernel.stages] + ["o9", "", "s0.in", "root"]
    args: tuple[Any, ...] = (None, -1, 1, 0, 2.5, True, "o0", "root", "", ("o0",), ("o0", "o1"), ("o0", "o0"), [1, 2], {}, 10 ** 12)
    return Opt(rng.choice([op, "LOCAL", "GROUP", "TC", "SPLITK", "ONLINE", "NOTHING"]), rng.choice(names), rng.choice(args))


def expanded(state: Scheduler) -> int:
    """Positions of straight-line code in the innermost body of the widest stage."""
    widest = 1
    for stage in state.kernel.stages:
        if state.place[stage.index] == INLINE:
            continue
        total = 1
        for axis in stage.outs + stage.reds:
            for row in state.axis_rows[axis]:
                if state.rows[row].role != LOOP:
                    total *= state.rows[row].extent
        widest = max(widest, total)
    return widest


def random_state(rng: random.Random, state: Scheduler, length: int, refused: list[tuple[Opt, str]] | None = None) -> Scheduler:
    """Apply about `length` legal random opts to `state`. Refused opts and the reasons are added to `refused`.

    Any exception of apply_opt other than KernelOptError is a bug and passes through."""
    for _ in range(4 * length):
        if len(state.applied_opts) >= length:
            break
        opt = random_opt(rng, state)
        try:
            following = apply_opt(state, opt)
        except KernelOptError as e:
            if refused is not None:
                refused.append((opt, str(e)))
            continue
        if expanded(following) <= MAX_EXPANDED:
            state = following
    return _prefetching(state)


def _prefetching(state: Scheduler) -> Scheduler:
    """One state in three loads an argument, or a staged value, ahead. The chain decides, so that no other draw depends on it."""
    rng = random.Random(repr(state.applied_opts))
    names = [*[f"p{i}" for i in range(1, len(state.kernel.params))], *[s.name for s in state.kernel.stages if not s.is_output]]
    if not names or rng.random() < 2 / 3:
        return state
    with suppress(KernelOptError):
        return apply_opt(state, Opt("PREFETCH", rng.choice(names), rng.randint(1, 8)))
    return state


def group_opt(rng: random.Random, state: Scheduler) -> Opt:
    """A proposal for the threads of a group or the grid, for copies that run ahead, or for softmax in blocks, not always legal."""
    kernel = state.kernel
    if not state.applied_opts and rng.random() < 0.1:
        return Opt("ONLINE", rng.choice(kernel.stages).name, rng.choice((2, 3, 4, 8)))
    around = [state.rows[place].name for place in state.place if isinstance(place, int)]
    if around and rng.random() < 0.2:
        return Opt("PIPELINE", rng.choice(around), rng.choice((2, 3)))
    loops = [r for r in state.rows if r.role == LOOP and r.extent > 1]
    if not loops:
        return Opt("NOLOCALS", "out")
    row = rng.choice(loops)
    op = "LOCAL" if kernel.axes[row.axis].kind == "o" else rng.choice(("GROUP", "GROUPTOP", "GROUP", "SPLITK"))
    return Opt(op, row.name, rng.choice(THREADS))


def group_state(rng: random.Random, state: Scheduler, length: int) -> Scheduler:
    """`state` after at most `length` random opts, about half of them for groups."""
    for _ in range(4 * length):
        if len(state.applied_opts) >= length:
            break
        following = try_opts(state, group_opt(rng, state) if rng.random() < 0.5 else random_opt(rng, state))
        if expanded(following) <= MAX_EXPANDED:
            state = following
    return state


def try_opts(state: Scheduler, *opts: Opt) -> Scheduler:
    """Apply those of `opts` to `state` that are legal there."""
    for opt in opts:
        with suppress(KernelOptError):
            state = apply_opt(state, opt)
    return state


def pipelined_state(rng: random.Random, state: Scheduler) -> Scheduler:
    """Copy all stages into shared memory in one loop of a sum, some iterations ahead, as far as that is legal."""
    out = state.kernel.stages[state.kernel.output]
    if not out.reds:
        return state
    loop = state.kernel.axes[rng.choice(out.reds)].name
    opts = [Opt("LOCAL", state.kernel.axes[a].name, rng.choice((2, 4, 8))) for a in out.outs]
    opts += [Opt("TILE", loop, rng.choice((2, 4, 8))), *[Opt("STAGE", s.name, loop) for s in state.kernel.stages if not s.is_output]]
    return try_opts(state, *opts, Opt("PIPELINE", loop, rng.choice((2, 3))))
