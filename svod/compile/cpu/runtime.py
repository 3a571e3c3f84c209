"""The native runtime: the worker loop of the thread pool and the function that runs a plan, as one LLVM IR module.

A plan is data, an array of launch records; nothing is compiled for it. `svod_run_plan` processes the records in order: it executes
single-core launches on the calling thread and distributes the others to workers that wait inside `svod_worker`. Python only starts threads,
fills memory and makes one call per plan. The layout of all memory is defined here (`Pool`, `Launch`, `Plan` offsets); `pool.py` and
`queue.py` allocate it.

How a launch is distributed. Each thread of a launch has a share of consecutive chunks. When a thread has finished its share, it takes
chunks of other shares. So a core uses the same memory in successive launches, and no thread waits while there is work. If the iterations do
not divide evenly, the chunks that are one iteration longer are spread over all shares, so that no share is longer than the others by
several iterations. The rest of a share is described by one 64-bit word, its *ticket*, on a separate cache line:

    generation (32 bits) | threads (10 bits) | chunks left (22 bits)

A thread with index < threads claims a chunk by compare-and-swap of a ticket with that ticket - 1 (the borrow cannot leave the lowest
field, as only a ticket with chunks left is decremented). A thread reads the fields of the job only after a successful claim. They cannot
change before it has finished the chunk: a new job is published only when `pending` is 0, and a claimed chunk counts in `pending` until the
thread that claimed it has subtracted it. A late worker therefore can only claim a chunk of the current job. The generation makes tickets of
successive jobs different. `latest` is (generation, threads, 0) of the job published last, written after its tickets: a worker that has
checked all shares of a generation finds no more work until `latest` changes.

How a worker sleeps. It spins for about 200 µs, then sets its flag to 1, increments `sleepers`, reads `latest` once more and waits on its
flag with a futex. The caller writes `latest`, then reads `sleepers`. All four accesses are sequentially consistent, so the worker sees the
new `latest` or the caller sees the sleeper. The thread that changes a flag from 1 to 0 decrements `sleepers`. Without futexes a worker
polls between short sleeps instead.

The records and the calls of a plan of two launches, the second one on two cores:

    records: [(f, args0, vars0, 0..64, threads 1, chunks 1), (g, args1, vars1, 0..100, threads 2, chunks 8)]
    calls:   f(args0, vars0, scratch, 0, 64)                      on the caller
             g(args1, vars1, scratch_0, 0, 13), g(…, 13, 26) …    on the caller, and at the same time
             g(args1, vars1, scratch_1, 52, 64), g(…, 64, 76) …   on the worker; the thread that finishes first helps the other one
"""
from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from string import Template

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import CODEGEN_REVISION, COMPILER, compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.object_cache import Build, CachedObject, ObjectCache, ObjectKey
from svod.system.forksafe import remake_after_fork
from svod.system.process.program import package_text

# Layout of the pool, in bytes. Words that the caller writes and words that workers write are on different cache lines.
LATEST, PENDING, LOCK, SLEEPERS, JOB, CONFIG, CORES, WORKERS = 0, 64, 128, 192, 256, 320, 448, 640
JOB_ENTRY, JOB_ARGS, JOB_VARS, JOB_BEGIN, JOB_QUOTIENT, JOB_REMAINDER, JOB_SHARE, JOB_LONGER = (
    JOB + 8 * i for i in range(8))      # share: chunks per thread; the first `longer` threads have one more
(CFG_STOP, CFG_SPIN, CFG_PATIENCE, CFG_SYSCALL, CFG_FUTEX, CFG_YIELD, CFG_SLEEP, CFG_NAP, CFG_GETCPU, CFG_GETAFFINITY,
 CFG_SETAFFINITY) = (CONFIG + 8 * i for i in range(11))
CORES_BYTES = 128               # one bit per core that a worker is pinned to: 1024 cores
CORE_COUNT, CORE_WORDS = CORES_BYTES * 8, CORES_BYTES // 8
WORKER_STRIDE = 192             # three lines per thread: the flag, the address of its scratch, its ticket
WORKER_SCRATCH, WORKER_TICKET = 64, 128
TICKETS = WORKERS + WORKER_TICKET
MAX_THREADS = 1023              # maximum number of threads that the ticket's field can hold
MAX_CHUNKS = (1 << 22) - 1

# Layout of a launch record and of the plan's header.
LAUNCH_BYTES = 64
LAUNCH_ENTRY, LAUNCH_ARGS, LAUNCH_VARS, LAUNCH_BEGIN, LAUNCH_END, LAUNCH_THREADS, LAUNCH_CHUNKS = (8 * i for i in range(7))
PLAN_BYTES = 64
PLAN_RECORDS, PLAN_COUNT, PLAN_POOL, PLAN_SCRATCH, PLAN_REPEATS = (8 * i for i in range(5))

RUNTIME_SYMBOLS = ("svod_worker", "svod_run_plan", "svod_run_group", "svod_stop", "svod_spin")

_PAUSE = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def runtime_ir(arch: str) -> str:
    """Return the LLVM IR of the runtime for an architecture: `runtime.ll` with its names replaced by the numbers of this module."""
    declare, pause = _PAUSE.get(arch, ("", "fence seq_cst"))
    numbers = {name: value for name, value in globals().items() if isinstance(value, int)}
    return Template(package_text("svod.compile.cpu", "runtime.ll")).substitute(numbers, DECLARE=declare, PAUSE=pause)


@dataclass(frozen=True)
class Runtime:
    """The loaded runtime. Addresses are of native functions; the callables release the interpreter lock while they run."""

    run_plan: Callable[[int], None]             # (address of a plan header)
    worker: Callable[[int, int], None]          # (address of the pool, index ≥ 1); returns when the pool is stopped
    stop: Callable[[int, int], None]            # (address of the pool, number of threads including the caller)
    spin: Callable[[int, int], None]            # (address of the pool, iterations)
    run_group: int                              # address, used as the entry of a launch
    code: LoadedProgram                         # keeps the machine code alive


_load_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_load_lock", threading.Lock)
_loaded: Runtime | None = None


def runtime(cache: ObjectCache | None = None) -> Runtime:
    """Return the runtime of this process, made on first use and never freed. The first call looks for its machine code in `cache`."""
    global _loaded
    with _load_lock:
        if _loaded is None:
            code = LoadedProgram(native_object("runtime", runtime_ir(host_target().arch), cache), RUNTIME_SYMBOLS)
            worker, run_plan, run_group, stop, spin = code.addresses
            one, two = ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
            _loaded = Runtime(one(run_plan), two(worker), two(stop), two(spin), run_group, code)
        return _loaded


def native_object(name: str, ir: str, cache: ObjectCache | None = None) -> bytes:
    """Return the object of functions written in LLVM IR for this machine and any number of threads, from the cache or compiled."""
    cache, target = cache or ObjectCache(), host_target()
    build = Build(target.key.rpartition("/")[0], CODEGEN_REVISION, COMPILER)
    key = ObjectKey(hashlib.blake2b(ir.encode(), digest_size=16).hexdigest(), name, build)
    entry = cache.get(key)
    if entry is None:
        entry = CachedObject(ProgramSpec(name, (), (), (), ()), compile_object(ir, target, True))
        cache.put(key, entry)
    return entry.code
