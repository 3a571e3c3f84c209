"""Single operations of svod in turns with those of other libraries on a CPU: what the scripts share that compare them.

    contestants: name → a run, and what it computes
        → the results agree with a reference, or it is said which do not
        → rounds: a sample of each, in random order; before each a pause, in which the threads of the one before stop spinning
        → a line: medians of all in milliseconds, and the best of the others beside svod, paired by round

All run with as many threads as svod. A library that is not installed is left out, which is said once.
"""
from __future__ import annotations

import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from svod.bench.peers import calls, keep_freed_memory
from svod.bench.race import Ratio, interleave, paired_ratio
from svod.bench.timer import SPIN_DOWN_SECONDS, Clock, calibrate
from svod.bench.timer import Contestant as Timed
from svod.compile.cpu.host import host_target
from svod.config import changed_environment

Run = Callable[[], Any]
Array = np.ndarray[Any, Any]
Times = dict[str, list[float]]      # name of a contestant → seconds of a run, in each round
LIBRARIES = {"scipy": "scipy", "torch": "torch", "jax": "jax"}      # name of a module → what pip installs
SLOW = 30           # times the fastest run from which on a contestant is timed no further


class Contestant(NamedTuple):
    """`run` computes once; `result` has what it computes, as NumPy's array."""

    run: Run
    result: Callable[[], Array]


@cache
def library(name: str) -> Any:
    """The module of a library, with as many threads as svod; None if it is not installed, which is said on stderr."""
    keep_freed_memory()
    try:
        module = importlib.import_module(name)
    except ImportError:
        print(f"{name} is left out, as it is not installed: pip install {LIBRARIES[name]}", file=sys.stderr, flush=True)
        return None
    if name == "torch":
        module.set_num_threads(host_target().threads)
    if name == "jax":
        module.config.update("jax_platforms", "cpu")
        with changed_environment(NPROC=str(host_target().threads)):      # the size of its pool, which is made now
            module.devices()
    return module


def of_plan(plan: Any, shown: Callable[[Sequence[Array]], Array]) -> Contestant:
    """A plan of svod; `shown` makes the result of its outputs, which are flat arrays."""
    return Contestant(plan.execute, lambda: (plan.execute(), shown(plan.outputs))[1])


def of_function(function: Run, shown: Callable[[Any], Array] = np.asarray) -> Contestant:
    """A function of another library; `shown` makes NumPy's array of what it returns."""
    return Contestant(function, lambda: shown(function()))


def race(runs: Mapping[str, Run], seconds: float, *, clock: Clock = time.perf_counter,
         sleep: Callable[[float], None] = time.sleep) -> Times:
    """Rounds for so many seconds, at least one. Of those that are SLOW there is only the time of the first calls, and no round."""
    contestants = [Timed(calls(run), name) for name, run in runs.items()]
    for run in runs.values():
        run()
    calibrated = [calibrate(c, None, clock) for c in contestants]
    most = SLOW * min(call for _, call in calibrated)
    timed = [i for i, (_, call) in enumerate(calibrated) if call <= most]
    found = {c.name: [call] for c, (_, call) in zip(contestants, calibrated, strict=True)}
    rounds: list[tuple[float, ...]] = []
    rng, end = random.Random(0), clock() + seconds
    while not rounds or clock() < end:
        rounds.append(interleave([contestants[i] for i in timed], [calibrated[i] for i in timed], rng, clock=clock,
                                 pause=lambda: sleep(SPIN_DOWN_SECONDS), warm=0.0))
    for i, times in zip(timed, zip(*rounds, strict=True), strict=True):
        found[contestants[i].name] = list(times)
    return found


def best_of(times: Times, names: Iterable[str]) -> str:
    """The name of the fastest of `names`, by medians; "" of none."""
    return min(names, key=lambda name: statistics.median(times[name]), default="")


def beside(times: Times, other: str, own: str = "svod") -> Ratio:
    """How many times as fast as `other` svod is. Of one that was too slow for the rounds, the ratio of medians alone is known."""
    if len(times[other]) != len(times[own]):
        return Ratio(statistics.median(times[other]) / statistics.median(times[own]), 0.0, float("inf"))
    return paired_ratio(times[other], times[own])


def header(title: str, columns: Iterable[str]) -> str:
    return f"{title:36}{'svod':>10}" + "".join(f"{name:>10}" for name in columns) + "   times as fast as the best of them"


def line(case: str, times: Times, columns: Sequence[str]) -> str:
    """Medians in milliseconds, svod's first; then svod beside the best of the others, with the interval of 95 %."""
    def shown(name: str) -> str:
        return f"{1e3 * statistics.median(times[name]):10.3f}" if name in times else f"{'–':>10}"
    text = f"{case:36}{shown('svod')}" + "".join(map(shown, columns))
    best = best_of(times, [name for name in columns if name in times])
    if not best:
        return text
    ratio = beside(times, best)
    sure = f" ({ratio.low:.2f}–{ratio.high:.2f})" if ratio.low else ""
    return f"{text}   {best} {ratio.median:.2f}×{sure}"


def chosen(cases: Iterable[str], parts: Sequence[str]) -> list[str]:
    """The cases whose names have one of `parts` in them; all where there are no parts."""
    return [case for case in cases if not parts or any(part in case for part in parts)]
