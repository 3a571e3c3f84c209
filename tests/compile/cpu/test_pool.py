"""The thread pool executes every iteration exactly once, also while other plans and threads run."""
import ctypes
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from svod.compile.cpu import runtime as rt
from svod.compile.cpu.pool import SPIN_SECONDS, Pool, fit_launch, spread, worker_cores
from svod.errors import LaunchError
from tests.compile import loop_kernels
from tests.patience import NEVER


def pointers(*arrays):
    return np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)


def record(name, args, extent, threads, chunks=0):
    return (loop_kernels.address(name), args.ctypes.data, 0, 0, extent, threads, chunks)


def run(pool, records, scratch_bytes=0, repeats=1):
    """Run launches in order: (entry, args address, vars address, begin, end, threads, chunks) each."""
    memory = np.zeros((len(records) + 1, rt.LAUNCH_BYTES // 8), np.int64)
    for row, launch in zip(memory, records, strict=False):
        row[:7] = launch
        _, _, _, begin, end, threads, chunks = launch
        row[5:7] = fit_launch(end - begin, threads, chunks, pool.threads)
    base = int(memory.__array_interface__["data"][0])
    shared = any(row[5] > 1 for row in memory[:-1])
    if shared:
        pool.prepare(scratch_bytes)
    header = base + rt.LAUNCH_BYTES * len(records)
    memory[-1, :5] = (base, len(records), pool.address if shared else 0, pool.caller_scratch(scratch_bytes), repeats)
    rt.runtime().run_plan(header)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("extent", [0, 1, 2, 13, 97, 1009])
def test_every_iteration_once(extent, threads):
    x = np.zeros(1010, np.int64)
    args = pointers(x)
    run(Pool.get(threads), [record("count", args, extent, threads)], repeats=50)
    assert (x[:extent] == 50).all() and (x[extent:] == 0).all()


@pytest.mark.parametrize("chunks", [1, 2, 5, 97])
def test_begin_and_chunks(chunks):
    x = np.zeros(120, np.int64)
    args = pointers(x)
    run(Pool.get(2), [(loop_kernels.address("count"), args.ctypes.data, 0, 11, 108, 2, chunks)])
    assert (x[11:108] == 1).all() and x.sum() == 97


@pytest.mark.parametrize(("threads", "chunks", "held", "own"), [(2, 8, 0, [4, 5, 6, 7]), (2, 7, 1, [0, 1, 2, 3]), (2, 3, 0, [2])])
def test_own_share_first_then_the_others(threads, chunks, held, own):
    """One of two threads is blocked in its first chunk until the other has run all other chunks: first its own share, then the rest of the
    blocked thread's share."""
    ran, started, both, rest = [], set(), threading.Barrier(2), threading.Event()
    first = (0, own[-1] + 1)[held]      # the held one's first chunk

    @ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
    def entry(args, variables, scratch, begin, end):
        if (me := threading.get_ident()) not in started:
            started.add(me)
            both.wait(NEVER)
        if begin == first:
            assert rest.wait(NEVER), "the other thread left chunks over"
        ran.append((me, begin, end))
        if len(ran) == chunks - 1:
            rest.set()

    run(Pool.get(threads), [(ctypes.cast(entry, ctypes.c_void_p).value, 0, 0, 0, chunks, threads, chunks)])
    helper, order = {thread for thread, _, _ in ran[:-1]}, [begin for _, begin, _ in ran]
    assert len(helper) == 1 and (threading.get_ident() in helper) == (held == 1)
    others = [k for k in range(chunks) if k not in own and k != first]
    assert order == [*own, *others, first] and all(end == begin + 1 for _, begin, end in ran)


@pytest.mark.parametrize("threads", [3, 5])
def test_every_chunk_once_when_chunks_do_not_divide(threads):
    for chunks in range(1, 23):
        x = np.zeros(120, np.int64)
        args = pointers(x)
        run(Pool.get(threads), [(loop_kernels.address("count"), args.ctypes.data, 0, 7, 113, threads, chunks)], repeats=20)
        assert (x[7:113] == 20).all() and x.sum() == 20 * 106


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_shares_are_even(threads):
    """Chunks with one more iteration are spread over all threads: the shares of two threads differ by at most one iteration."""
    chunks = 4 * threads
    for extent in range(chunks, 6 * chunks + 1):
        ran = []

        @ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
        def entry(args, variables, scratch, begin, end, ran=ran):
            ran.append((begin, end))

        run(Pool.get(threads), [(ctypes.cast(entry, ctypes.c_void_p).value, 0, 0, 0, extent, threads, chunks)])
        ran.sort()
        assert len(ran) == chunks and ran[0][0] == 0 and ran[-1][1] == extent
        assert all(before[1] == after[0] for before, after in pairwise(ran))
        shares = [ran[i + 3][1] - ran[i][0] for i in range(0, chunks, 4)]
        assert max(shares) - min(shares) <= 1, (extent, shares)


def test_ten_thousand_dispatches():
    x = np.zeros(8, np.int64)
    args = pointers(x)
    run(Pool.get(3), [record("count", args, 8, 3, 8)] * 10, repeats=1000)
    assert (x == 10_000).all()


def test_single_thread_makes_no_threads():
    pool = Pool(1)
    x = np.zeros(5, np.int64)
    args = pointers(x)
    before = threading.active_count()
    run(pool, [record("count", args, 5, 4)])
    assert threading.active_count() == before and (x == 1).all()


def test_concurrent_callers():
    pool = Pool.get(3)
    arrays = [np.zeros(57, np.int64) for _ in range(4)]

    def work(x):
        args = pointers(x)
        for _ in range(100):
            run(pool, [record("count", args, 57, 3)] * 3, repeats=7)

    callers = [threading.Thread(target=work, args=(x,)) for x in arrays]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for x in arrays:
        assert (x == 2100).all()


def test_after_idle_periods():
    pool = Pool.get(2)
    x = np.zeros(31, np.int64)
    args = pointers(x)
    for pause in (0, *(SPIN_SECONDS * share for share in (0.4, 0.6, 0.7, 0.8, 0.9, 1, 1.2)), 1e-3, 1e-2) * 7:
        time.sleep(pause)
        run(pool, [record("count", args, 31, 2)])
    assert (x == 70).all()


def test_stop_and_start_again():
    pool = Pool(3)
    x = np.zeros(100, np.int64)
    args = pointers(x)
    for round_ in range(1, 4):
        run(pool, [record("count", args, 100, 3)], repeats=10)
        assert (x == 10 * round_).all()
        pool.stop()
        pool.stop()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_plan_that_runs_while_python_ends_does_not_wait_for_threads():
    """A plan that runs in an object's destructor at exit, after the workers have ended, runs on the calling thread: no thread can start."""
    script = """
import numpy as np
from svod import Tensor

a = np.arange(200 * 200, dtype=np.float32).reshape(200, 200) % 7
plan, want = (Tensor(a) @ Tensor(a)).prepare(), (a @ a).tobytes()
plan.execute()

class Owner:
    def __del__(self):
        out = self.plan.outputs[0]
        out[:] = 0
        self.plan.execute()
        print("right" if out.tobytes() == want else "wrong", flush=True)

owner = Owner()
owner.plan = plan
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=NEVER)
    assert (ended.returncode, ended.stdout) == (0, "right\n"), ended.stderr


def test_fork():
    pool = Pool.get(3)
    x = np.zeros(100, np.int64)
    args = pointers(x)
    run(pool, [record("count", args, 100, 3)], repeats=10)
    child = os.fork()
    if child == 0:
        run(pool, [record("count", args, 100, 3)], scratch_bytes=4096, repeats=10)
        os._exit(0 if (x == 20).all() and len(pool._workers) == pool.threads - 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run(pool, [record("count", args, 100, 3)], repeats=10)
    assert (x == 20).all()


def test_workers_have_scratch_of_their_own():
    pool = Pool.get(3)
    x = np.zeros(3000, np.int64)
    args = pointers(x)
    for size in (64, 100_000, 5 << 20):
        seen: set[int] = set()
        for _ in range(200):
            run(pool, [record("touch", args, 3000, 3, 300)], scratch_bytes=size)
            seen |= set(x.tolist())
        assert all(address % 64 == 0 for address in seen)
        ordered = sorted(seen)
        assert all(b - a >= size for a, b in pairwise(ordered))
        run(pool, [record("scratch", args, 3000, 3)], scratch_bytes=size, repeats=20)
        assert (x == np.arange(3000)).all()


def test_affinity_of_the_caller_is_kept():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system has no affinity masks")
    before = os.sched_getaffinity(0)
    x = np.zeros(100, np.int64)
    args = pointers(x)
    pool = Pool.get(2)
    for _ in range(20):
        time.sleep(1e-3)
        run(pool, [record("count", args, 100, 2)], repeats=3)
    assert os.sched_getaffinity(0) == before
    assert len(worker_cores(len(before) - 1)) == len(before) - 1
    assert worker_cores(len(before)) == []


def test_cores_are_spread_over_physical_ones(monkeypatch):
    monkeypatch.setattr("svod.compile.cpu.pool.physical_core", lambda core: str(core // 2))
    assert spread({0, 1, 2, 3, 4, 5}, 3) == [3, 0, 4, 1, 2, 5]
    assert spread({1, 4}, 4) == [4, 1] and spread({2}, 2) == [2]


def test_fit_launch():
    assert fit_launch(0, 4, 0, 8) == (1, 1)
    assert fit_launch(1, 4, 0, 8) == (1, 1)
    assert fit_launch(3, 4, 0, 8) == (3, 3)
    assert fit_launch(100, 4, 0, 8) == (4, 16)
    assert fit_launch(100, 4, 0, 2) == (2, 8)
    assert fit_launch(10**9, 4, 10**8, 8) == (4, rt.MAX_CHUNKS)


def test_bad_sizes():
    with pytest.raises(LaunchError, match="0 threads"):
        Pool(0)
    with pytest.raises(LaunchError, match="5000 threads"):
        Pool.get(5000)
