"""Pins each thread that works for a contestant to a core while contestants are timed.

    thread               core
    the caller           0
    svod's worker        1        pinned by svod itself
    PyTorch's worker     1
    XLA's threads        0, 1     distributed by the processor time that each uses

A system may wake a library's thread on the caller's core and leave it there although another core is idle. In a process with several
libraries, both threads shared a core in most runs and took twice as long as in a separate process. The threads that work for a contestant
are found by their processor time while it runs, not by asking the library.
"""
from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import get_native_id

from svod.bench.timer import Contestant, warm_up
from svod.compile.cpu.pool import spread
from svod.system.process.cores import affinity

TASKS = Path("/proc/self/task")
PLACING_SECONDS = 20e-3     # a contestant runs for at least this long, or once, to find the threads that work
WORKING_SHARE = 0.1         # least share of the busiest thread's processor time; a thread that uses less is regarded as idle

# the function `placed`, or a replacement in tests
Place = Callable[[Sequence[Contestant], Callable[[], None]], AbstractContextManager[None]]


@contextmanager
def placed(contestants: Sequence[Contestant], pause: Callable[[], None]) -> Iterator[None]:
    """Pin the calling thread and each thread that works for one of `contestants` to a core within the context. Threads are placed
    busiest first, each on the core with the least work for that contestant. A thread that works for several contestants keeps its first
    core; a thread that is pinned already keeps its core. On exit every thread gets its former cores back. `pause` waits until the
    threads of one contestant are idle, before the next one runs. Nothing is pinned on a single core, or if the system does not report
    the processor time of threads."""
    allowed = set(affinity())
    if len(allowed) < 2 or not any(_processor_times().values()):
        yield
        return
    before = {thread: _cores_of(thread) for thread in _processor_times()}
    pinned = {core for cores in before.values() if len(cores) == 1 for core in cores}
    own = next((c for c in spread(allowed, min(allowed)) if c not in pinned), min(allowed))

    def may_run_on(thread: int) -> set[int]:
        cores = _cores_of(thread)       # a new thread inherits the caller's single core
        return allowed if thread not in before and cores == {own} else cores
    try:
        _keep_on(get_native_id(), {own})
        for contestant in contestants:
            pause()
            used = _used_by(contestant)
            cores_of = {t: may_run_on(t) for t in used}
            for thread, core in distribute(used, cores_of, spread(allowed, own)).items():
                before.setdefault(thread, cores_of[thread])
                _keep_on(thread, {core})
        yield
    finally:
        for thread in _processor_times():
            _keep_on(thread, before[thread] if thread in before else may_run_on(thread))


def distribute(used: Mapping[int, int], cores_of: Mapping[int, Collection[int]], order: Sequence[int]) -> dict[int, int]:
    """Choose a core for each thread that may run on several, the busiest thread first: the core with the least processor time so far;
    among equal ones, the first in `order`. `used` is the processor time of each thread, `cores_of` the cores it may run on. Idle threads
    are left out."""
    least = WORKING_SHARE * max(used.values(), default=0)
    load = Counter[int]()
    for thread, t in used.items():
        if len(cores_of[thread]) == 1:
            load.update(dict.fromkeys(cores_of[thread], t))
    core_of = {}
    for thread in sorted(used, key=lambda t: (-used[t], t)):
        choice = [core for core in order if core in cores_of[thread]]
        if len(cores_of[thread]) > 1 and choice and used[thread] >= least:
            core_of[thread] = core = min(choice, key=lambda c: load[c])
            load[core] += used[thread]
    return core_of


def _used_by(contestant: Contestant) -> dict[int, int]:
    """Nanoseconds of processor time of each thread while `contestant` runs."""
    before = _processor_times()
    warm_up(contestant, PLACING_SECONDS, time.perf_counter)
    return {thread: t - before.get(thread, 0) for thread, t in _processor_times().items() if t > before.get(thread, 0)}


def _processor_times() -> dict[int, int]:
    """Nanoseconds of processor time of each thread of this process; {} or zeros if the system does not report them."""
    times = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for task in TASKS.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):       # the thread has ended
                times[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return times


def _cores_of(thread: int) -> set[int]:
    with suppress(OSError):         # the thread has ended
        return set(affinity(thread))
    return set()


def _keep_on(thread: int, cores: Collection[int]) -> None:
    with suppress(OSError):         # the thread has ended, or the process may use fewer cores now
        os.sched_setaffinity(thread, cores)
