"""The thread pool: worker threads, their cores and their scratch memory. The code that the workers execute is in `runtime.py`.

Each process has one pool (`Pool.get`). Workers are daemon threads that stay inside native code: they spin for about 200 µs after the last
launch and then sleep until the next one. A plan takes the pool while it runs, by a try-lock; a plan that runs at the same time fails to
take it and runs on its calling thread only. A program that asks for one thread starts no workers.

After a fork the child restarts the workers, because threads do not survive a fork. At exit the pool is stopped before machine code is
freed.
"""
from __future__ import annotations

import atexit
import ctypes
import logging
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Collection

import numpy as np

from svod.compile.cpu import runtime as rt
from svod.config import log_once
from svod.core.graph.allocator import LARGE_ARRAYS, OWN_BLOCK_BYTES, private_memory
from svod.errors import LaunchError
from svod.system.forksafe import remake_after_fork
from svod.system.process.cores import affinity, physical_core
from svod.system.process.threads import Joinable, start_native

log = logging.getLogger("svod")
SPIN_SECONDS = 200e-6       # a worker stops spinning after this time without work: Python takes up to 150 µs between two runs of a plan
PATIENCE_SECONDS = 20e-6    # a caller waits this long before it yields its core
NAP_MICROSECONDS = 100      # sleep of a worker between two checks for work on systems without futexes
PAGE = 4096

# System call numbers: futex, sched_setaffinity, sched_getaffinity (Linux, asm/unistd.h of each architecture).
_SYSCALLS = {"x86_64": (202, 203, 204), "aarch64": (98, 122, 123)}


class Arena:
    """Uninitialised memory of at least `size` bytes at `address`, which is 64-byte aligned at an offset within its page that depends on
    `stagger`. `touch`: take the page faults now; otherwise the launches that first write the memory take them, on all their cores.

    The different offsets avoid 4 KiB aliasing: if the scratch of two workers, or scratch and a large array, had the same low 12 address
    bits, stores to one would delay loads from the other."""

    __slots__ = ("_memory", "address", "size")

    def __init__(self, size: int, stagger: int, touch: bool = True) -> None:
        offset = (17 + 5 * stagger) % 64 * 64
        length = -(-(size + offset) // PAGE) * PAGE
        self._memory = LARGE_ARRAYS.allocate(length) if length >= OWN_BLOCK_BYTES else np.frombuffer(private_memory(length), np.uint8)
        if touch:
            self._memory[::PAGE] = 0
        self.address = int(self._memory.__array_interface__["data"][0]) + offset
        self.size = length - offset


class Pool:
    """A pool of `threads` threads, counting the caller, and their scratch memory. Get it by `Pool.get`: a second pool would compete for the
    same cores."""

    _shared: Pool | None = None
    _shared_lock = threading.Lock()

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= rt.MAX_THREADS:
            raise LaunchError(f"a thread pool of {threads} threads was asked for; it can have 1 to {rt.MAX_THREADS}")
        self.threads = threads
        self._map = private_memory(rt.WORKERS + rt.WORKER_STRIDE * (rt.MAX_THREADS + 1))
        self.address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
        self._guard = threading.Lock()          # acquired while scratch grows and workers start, never while a plan runs
        self._workers: list[Joinable] = []
        self._arenas: list[Arena] = []          # all scratch, including areas that were replaced: a running launch may still be using them
        self._scratch_bytes = 0
        self._scratch_workers = 0               # workers that have `_scratch_bytes` of scratch
        self._local = threading.local()         # the calling threads' own scratch
        self.ready = False                      # all workers run and have scratch
        self.ended = False                      # Python is exiting

    @classmethod
    def get(cls, threads: int) -> Pool:
        """Return the process's pool, with at least `threads` threads including the caller. It starts no threads (see `prepare`)."""
        pool = cls._shared
        if pool is not None and pool.threads >= threads:
            return pool
        with cls._shared_lock:
            pool = cls._shared
            if pool is None:
                pool = cls._shared = Pool(threads)
            elif pool.threads < threads:
                if threads > rt.MAX_THREADS:
                    raise LaunchError(f"a thread pool of {threads} threads was asked for; it can have 1 to {rt.MAX_THREADS}")
                pool.threads = threads
                pool.ready = False
            return pool

    def prepare(self, scratch_bytes: int = 0) -> None:
        """Start the missing workers and give each at least `scratch_bytes` of scratch. It is cheap if nothing is missing. While Python
        exits, threads can no longer be started: the caller then does all the work of a launch."""
        if (self.ready and scratch_bytes <= self._scratch_bytes) or self.ended:
            return
        with self._guard:
            self._grow_scratch(scratch_bytes)
            self._start_workers()
            self.ready = True

    def caller_scratch(self, size: int) -> int:
        """Return the address of at least `size` bytes of the calling Python thread's own scratch; 0 bytes: address 0."""
        if size == 0:
            return 0
        arena: Arena | None = getattr(self._local, "arena", None)
        if arena is None or arena.size < size:
            arena = self._local.arena = Arena(size if arena is None else max(size, 2 * arena.size), 0)
        return arena.address

    def stop(self) -> None:
        """Stop the workers and wait for them. The pool starts again with the next `prepare`."""
        with self._guard:
            if self._workers:
                rt.runtime().stop(self.address, len(self._workers) + 1)
                for worker in self._workers:
                    worker.join(1.0)
                self._workers.clear()
            self.ready = False

    def _grow_scratch(self, size: int) -> None:
        if size > self._scratch_bytes:
            self._scratch_bytes = max(size, 2 * self._scratch_bytes)
            self._scratch_workers = 0
        if self._scratch_bytes:
            for index in range(self._scratch_workers + 1, self.threads):
                arena = Arena(self._scratch_bytes, index)
                self._arenas.append(arena)
                self._write("q", rt.WORKERS + rt.WORKER_STRIDE * index + rt.WORKER_SCRATCH, arena.address)
            self._scratch_workers = self.threads - 1

    def _start_workers(self) -> None:
        code = rt.runtime()
        if not self._workers:
            self._reset(code)
        cores = worker_cores(self.threads - 1)
        for index in range(len(self._workers) + 1, self.threads):
            core = cores[index - 1] if index <= len(cores) else None
            try:
                self._workers.append(start_native(f"svod-{index}", _work, code, self.address, index, core))
            except RuntimeError as e:           # the system allows no more threads: the existing ones do all the work
                log_once(log, logging.WARNING, f"kernels run on {index} of {self.threads} threads: {e}")
                return
            if core is not None and core < 8 * rt.CORES_BYTES:
                self._map[rt.CORES + core // 8] |= 1 << core % 8

    def _reset(self, code: rt.Runtime) -> None:
        """Write the configuration and reset the state that earlier workers left. Scratch stays."""
        scratch = [self._map[o:o + 8] for o in range(rt.WORKERS + rt.WORKER_SCRATCH, len(self._map), rt.WORKER_STRIDE)]
        self._map[:] = bytes(len(self._map))
        for offset, address in zip(range(rt.WORKERS + rt.WORKER_SCRATCH, len(self._map), rt.WORKER_STRIDE), scratch, strict=True):
            self._map[offset:offset + 8] = address
        turn = _seconds_per_turn(code, self.address)
        self._write("q", rt.CFG_SPIN, max(1, round(SPIN_SECONDS / turn)))
        self._write("q", rt.CFG_PATIENCE, max(2, round(PATIENCE_SECONDS / turn)))
        system = _system_functions()
        for offset, value in system.items():
            self._write("q", offset, value)

    def _write(self, fmt: str, offset: int, value: int) -> None:
        struct.pack_into(fmt, self._map, offset, value)

    def _forget_threads(self) -> None:
        """Reset the workers and locks in the child after a fork."""
        self._guard = threading.Lock()
        self._workers = []
        self._local = threading.local()
        self._write("q", rt.LOCK, 0)
        self._write("q", rt.LATEST, 0)
        self.ready = False


def fit_launch(extent: int, threads: int, chunks: int, limit: int) -> tuple[int, int]:
    """Return the (threads, chunks) of a launch of `extent` iterations. `threads`: the number of threads asked for; `limit`: the number
    that exist. `chunks`: the number of chunks asked for; 0: four per thread, so that other threads can take work from a delayed one.
    There is at most one chunk per iteration."""
    threads = max(1, min(threads, limit, extent))
    if threads == 1:
        return 1, 1
    return threads, max(1, min(chunks or 4 * threads, extent, rt.MAX_CHUNKS))


def worker_cores(count: int) -> list[int]:
    """Choose the cores to pin `count` workers to: cores of the affinity mask other than the caller's, the first one of each physical
    core before second ones. Returns [] if the mask has too few cores or the system cannot pin threads; then no worker is pinned."""
    if count < 1 or not hasattr(os, "sched_setaffinity"):
        return []
    allowed = affinity()
    if len(allowed) <= count:
        return []
    current = _current_core()
    return spread(allowed, current if current in allowed else min(allowed))[1:count + 1]


def spread(cores: Collection[int], own: int) -> list[int]:
    """List the cores in the order of pinning: `own`, the first logical core of each other physical core, the remaining ones."""
    first = {physical_core(core): core for core in (*sorted(cores, reverse=True), own)}
    distinct = sorted(set(first.values()) - {own})
    return [own, *distinct, *sorted(set(cores) - {own, *distinct})]


def _current_core() -> int:
    getcpu = getattr(_libc(), "sched_getcpu", None) if sys.platform == "linux" else None
    return int(getcpu()) if getcpu is not None else -1


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0        # type: ignore[arg-type]


def _system_functions() -> dict[int, int]:
    """Return the functions and numbers of the operating system that the runtime uses: offset in the pool's memory → address or number to
    write there."""
    libc = _libc()
    functions = {rt.CFG_YIELD: _address(libc.sched_yield), rt.CFG_SLEEP: _address(libc.usleep), rt.CFG_NAP: NAP_MICROSECONDS}
    numbers = _SYSCALLS.get(platform.machine())
    if sys.platform == "linux" and numbers is not None and sys.maxsize > 1 << 32:
        futex, setaffinity, getaffinity = numbers
        functions |= {rt.CFG_SYSCALL: _address(libc.syscall), rt.CFG_FUTEX: futex, rt.CFG_SETAFFINITY: setaffinity,
                      rt.CFG_GETAFFINITY: getaffinity}
        if hasattr(libc, "sched_getcpu"):
            functions[rt.CFG_GETCPU] = _address(libc.sched_getcpu)
    return functions


def _seconds_per_turn(code: rt.Runtime, address: int) -> float:
    """Measure the seconds of one iteration of the waiting loop: the minimum of five tries."""
    turns = 2000
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        code.spin(address, turns)
        best = min(best, time.perf_counter() - start)
    return max(best / turns, 1e-10)


remake_after_fork(Pool, "_shared_lock", threading.Lock)


def _work(code: rt.Runtime, address: int, index: int, core: int | None) -> None:
    if core is not None:
        try:
            os.sched_setaffinity(0, {core})
        except OSError:
            core = None                         # the mask was narrowed meanwhile: run on any core that the system allows
    code.worker(address, index)


def _after_fork_in_child() -> None:
    if Pool._shared is not None:
        Pool._shared._forget_threads()


def _at_exit() -> None:
    if Pool._shared is not None:
        Pool._shared.ended = True
        Pool._shared.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
