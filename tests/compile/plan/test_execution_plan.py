"""Plans give the results of their kernels run one by one, follow new addresses and values of variables, and refuse invalid arguments."""
import os
import threading

import numpy as np
import pytest

from svod.compile.cpu.pool import Pool
from svod.compile.lower.program import PackedTemporaries, PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel
from svod.core.ir.dtype import dtypes
from svod.core.schedule.regions import Region
from svod.errors import LaunchError
from tests.compile import loop_kernels

N = 97


def kernel(name, buffers, **more):
    options = {k: more.pop(k) for k in ("threads", "scratch", "variables") if k in more}
    return PreparedKernel(loop_kernels.spec(name, N, slots=len(buffers), **options), loop_kernels.loaded(name), buffers, name, **more)


def array(value=0, n=N):
    return np.full(n, value, np.int64)


def diamond(threads, levels, planner="arena"):
    """Make a plan of y = (3(3x+1)+1) + (3x+1), with two intermediate buffers; x is bound later."""
    y = array(-1)
    buffers = [PlanBuffer(8 * N, "input"), *[PlanBuffer(8 * N, "intermediate")] * 2, PlanBuffer(8 * N, "output", y)]
    lv = levels or (None, None, None)
    kernels = [kernel("affine", (1, 0), threads=threads, level=lv[0]), kernel("affine", (2, 1), threads=threads, level=lv[1]),
               kernel("sum", (3, 2, 1), threads=threads, level=lv[2])]
    return ExecutionPlan(kernels, buffers, [3], threads=threads, planner=planner), y


@pytest.mark.parametrize("planner", ["arena", "remap", "disabled"])
@pytest.mark.parametrize("levels", [None, (0, 1, 2)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_chain_of_kernels(threads, levels, planner):
    plan, y = diamond(threads, levels, planner)
    for seed in range(5):
        x = np.random.default_rng(seed).integers(-99, 99, N)
        plan.bind_array(0, x)
        plan.execute()
        assert (y == 12 * x + 5).all()
    assert plan.outputs[0] is y


def test_dead_intermediates_share_memory():
    buffers = [PlanBuffer(8 * N, "input", array(1)), *[PlanBuffer(8 * N, "intermediate")] * 6, PlanBuffer(8 * N, "output", array())]
    kernels = [kernel("affine", (i + 1, i)) for i in range(7)]
    plan = ExecutionPlan(kernels, buffers, [7])
    assert plan.memory.shared == plan.memory.lower_bound == 2 * (8 * N + 56) and plan.memory.kept == 0
    apart = ExecutionPlan(kernels, buffers, [7], planner="disabled").memory
    assert apart.shared == 6 * (8 * N + 56) and apart.lower_bound == plan.memory.lower_bound
    plan.execute()
    assert (plan.outputs[0] == 3**7 + (3**7 - 1) // 2).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_independent_kernels_of_a_level(threads):
    x, outs = array(2), [array() for _ in range(5)]
    buffers = [PlanBuffer(8 * N, "input", x), *[PlanBuffer(8 * N, "output", o) for o in outs]]
    first = [kernel("affine", (i, 0), level=0) for i in (1, 2)]
    wide = [kernel("affine", (3, 0), level=0, threads=2)]
    second = [kernel("sum", (4, 1, 2), level=1), kernel("sum", (5, 1, 3), level=1)]
    plan = ExecutionPlan([*first, *wide, *second], buffers, [4, 5], threads=threads)
    for value in (2, 5, -3):
        x[:] = value
        plan.execute()
        assert all((o == 3 * value + 1).all() for o in outs[:3]) and all((o == 6 * value + 2).all() for o in outs[3:])
    assert len(plan.profile(2)) == 5 and all(0 < t < 1 for t in plan.profile(2))


def test_kernel_of_several_phases_with_a_temporary():
    def two_phases(threads, once):
        phases = (PhaseSpec("a", N, threads, 0, once), PhaseSpec("b", N, threads, 0))
        return ProgramSpec("two", ((dtypes.int64, N), (dtypes.int64, N)), (0,), (8 * N,), phases)

    for threads in (1, 2):
        # Arguments are (out, in, temporary): both phases write `out`, the second from `in`.
        out, x, other = array(), array(4), array()
        buffers = [PlanBuffer(8 * N, "output", out), PlanBuffer(8 * N, "input", x), PlanBuffer(8 * N, "output", other)]
        spec = two_phases(threads, False)
        kernels = [PreparedKernel(spec, loop_kernels.loaded("affine", "count"), (0, 1), level=0),
                   PreparedKernel(spec, loop_kernels.loaded("affine", "count"), (2, 1), level=0)]
        plan = ExecutionPlan(kernels, buffers, [0], threads=2)
        plan.repeat(3)
        assert (out == 14).all() and (other == 14).all()
        assert plan.memory.shared >= 2 * 8 * N

        # A once phase runs while the plan is made and never again.
        code = loop_kernels.loaded("affine", "count")
        plan = ExecutionPlan.of_kernel(two_phases(threads, True), code, [out, x], threads=2, constants=[1])
        assert (out == 13).all() and plan.prepare_seconds > 0
        plan.execute()
        plan.execute()
        plan.repeat_kernel(0, 3)
        assert (out == 18).all()


def test_only_what_once_phases_fill_outlives_a_run():
    """Two kernels with packed constants share the memory of their other temporaries."""
    phases = (PhaseSpec("a", N, 1, 0, once=True), PhaseSpec("b", N, 1, 0))
    spec = ProgramSpec("two", ((dtypes.int64, N), (dtypes.int64, N)), (0,), (64, 4096), phases)
    packing = PackedTemporaries((0,), (1,), "digest")
    buffers = [PlanBuffer(8 * N, "input", array()), *[PlanBuffer(8 * N, "output", array()) for _ in range(2)]]
    code = loop_kernels.loaded("affine", "count")

    def memory(packing):
        kernels = [PreparedKernel(spec, code, (out, 0), level=level, packing=packing) for level, out in enumerate((1, 2))]
        return ExecutionPlan(kernels, buffers, [1, 2]).memory
    assert (memory(packing).shared, memory(packing).kept) == (4096, 2 * 64)
    assert (memory(None).shared, memory(None).kept) == (0, 2 * (64 + 4096))


def test_variables():
    x, y, z = array(1), array(), array()
    buffers = [PlanBuffer(8 * N, "input", x), PlanBuffer(8 * N, "output", y), PlanBuffer(8 * N, "output", z)]
    plan = ExecutionPlan([kernel("addvar", (1, 0), variables=("n",)), kernel("addvar", (2, 0), variables=("m",))], buffers, [1, 2])
    with pytest.raises(LaunchError, match="m, n have no value"):
        plan.execute()
    plan.execute(n=5, m=7)
    assert (y == 6).all() and (z == 8).all()
    plan.execute(m=-2)
    assert (y == 6).all() and (z == -1).all()
    replica = plan.replicate()
    replica.execute(n=1)
    assert [int(o[0]) for o in replica.outputs] == [2, -1] and (y == 6).all()
    with pytest.raises(LaunchError, match=r"k were given; the plan has m, n"):
        plan.execute(k=1)


def test_slices():
    for threads in (1, 2):
        x = array()
        plan = ExecutionPlan.of_kernel(loop_kernels.spec("count", N, threads), loop_kernels.loaded("count"), [x], threads=2)
        plan.set_range(0, 0, 10, 41)
        plan.execute()
        plan.repeat_kernel(0, 2)
        assert (x[10:41] == 3).all() and x.sum() == 93
        plan.set_range(0, 0, 0, N)
        plan.execute()
        assert x.sum() == 93 + N
        with pytest.raises(LaunchError, match="0 to 97"):
            plan.set_range(0, 0, 0, N + 1)


def test_scratch_of_the_caller_and_of_workers():
    for threads in (1, 3):
        x = array()
        spec = loop_kernels.spec("scratch", N, threads, scratch=4096)
        plan = ExecutionPlan.of_kernel(spec, loop_kernels.loaded("scratch"), [x], threads=3)
        plan.repeat(20)
        assert (x == np.arange(N)).all()


def test_concurrent_plans_from_four_threads():
    failures = []

    def work(plan, y, rounds):
        for i in range(rounds):
            with plan.lock:
                plan.bind_array(0, array(i))
                plan.execute()
                if not (y == 12 * i + 5).all():
                    failures.append(i)

    plans = [diamond(3, None), diamond(2, None)]
    callers = [threading.Thread(target=work, args=(*plans[i % 2], 300)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_fork():
    plan, y = diamond(2, None)
    plan.bind_array(0, array(1))
    plan.execute()
    for running in (False, True):
        plan._runs._is_launching = running             # pretends that another thread is inside execute()
        plan.lock.acquire()
        child = os.fork()
        if child == 0:
            try:
                y[:] = 0
                plan.execute()
                os._exit(0 if (y == 17).all() else 2)
            except LaunchError as error:
                os._exit(1 if "forked" in str(error) else 3)
        plan.lock.release()
        plan._runs._is_launching = False
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(running)
    plan.execute()
    assert (y == 17).all()


def test_a_poisoned_plan_refuses():
    plan, _ = diamond(1, None)
    plan.bind_array(0, array(1))
    plan._runs.poison("kernel 2 was lost")
    with pytest.raises(LaunchError, match="kernel 2 was lost; prepare it again"):
        plan.execute()


def test_a_plan_stopped_half_way_refuses_when_it_changed_what_runs_start_from(monkeypatch):
    """Kernel 0 increments x. After an interrupted run of the kernels one by one, another run would start from changed values, so it is
    refused."""
    x, y = array(1), array()
    buffers = [PlanBuffer(8 * N, "output", x), PlanBuffer(8 * N, "output", y)]
    for carried, stop, refuses in [((0,), 1, True), ((0,), 0, True), ((), 1, False), ((1,), 0, False)]:
        plan = ExecutionPlan([kernel("count", (0,)), kernel("affine", (1, 0))], buffers)
        plan.bindings.carried = frozenset(carried)
        run, calls = plan._runs.run_kernel, []

        def interrupted(i, times, calls=calls, stop=stop, run=run):
            if i == stop:
                raise KeyboardInterrupt
            calls.append(i)
            run(i, times)

        monkeypatch.setattr(plan._runs, "run_kernel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan.profile(1)
        assert calls == list(range(stop))
        if refuses:
            with pytest.raises(LaunchError, match=r"a run stopped half-way, after buffer 0, .* prepare it again"):
                plan.execute()
        else:
            plan.execute()


def test_intermediates_released_and_allocated_anew():
    plan, y = diamond(2, (0, 1, 2))
    plan.bind_array(0, array(1))
    plan.execute()
    assert plan.release_intermediate_buffers() == plan.memory.shared > 0
    assert plan.release_intermediate_buffers() == 0
    assert (y == 17).all()
    for i in (2, 3):
        plan.bind_array(0, array(i))
        plan.execute()
        assert (y == 12 * i + 5).all()
    assert plan.release_intermediate_buffers() == plan.memory.shared


def test_replicas_run_at_the_same_time():
    plan, y = diamond(2, (0, 1, 2))
    plan.bind_array(0, array(-5))
    replicas = [plan.replicate(threads=1 + i % 2) for i in range(4)]
    assert [r.threads for r in replicas] == [1, 2, 1, 2] and all(r.kernels is plan.kernels for r in replicas)
    plan.execute()
    inside = threading.Barrier(4)
    wrong = []

    def work(i):
        replica = replicas[i]
        inside.wait()
        for x in range(100):
            if x:           # the first time what was bound when it was made
                replica.bind_array(0, array(1000 * i + x))
            replica.execute()
            if not (replica.output_buffer() == (12 * (1000 * i + x) + 5 if x else -55)).all():
                wrong.append((i, x))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and (y == -55).all()
    plan.bindings.carried = frozenset((3,))
    with pytest.raises(LaunchError, match="goes on from what it wrote to buffer 3 cannot run twice"):
        plan.replicate()
    plan._runs.poison("it was lost")
    with pytest.raises(LaunchError, match="it was lost"):
        plan.replicate()


def test_outputs_by_position():
    plan, y = diamond(1, None)
    assert plan.output_buffer() is y and plan.outputs == (y,)
    other = array()
    plan.bind_array(3, other)
    plan.bind_array(0, array(1))
    plan.execute()
    assert plan.output_buffer(0) is other and (other == 17).all()
    for position in (1, -1):
        with pytest.raises(LaunchError, match=f"output {position} was asked for; the plan has 1"):
            plan.output_buffer(position)


def test_refusals():
    x, y = array(), array()
    read_only = array()
    read_only.flags.writeable = False
    out, bound = PlanBuffer(8 * N, "output", y), PlanBuffer(8 * N, "input", x)
    with pytest.raises(LaunchError, match="takes 2 buffers and was given 1"):
        ExecutionPlan([PreparedKernel(loop_kernels.spec("affine", N, slots=2), loop_kernels.loaded("affine"), (0,))], [out])
    with pytest.raises(LaunchError, match="776 bytes; buffer 1 has 80"):
        ExecutionPlan([kernel("affine", (0, 1))], [out, PlanBuffer(80, "input", x)])
    with pytest.raises(LaunchError, match="buffer 7 was asked for; the plan has 2"):
        ExecutionPlan([kernel("affine", (0, 7))], [out, bound])
    with pytest.raises(LaunchError, match="not C-contiguous"):
        ExecutionPlan([kernel("affine", (0, 1))], [out, PlanBuffer(8 * N, "input", array(n=2 * N)[::2])])
    with pytest.raises(LaunchError, match="read-only"):
        ExecutionPlan([kernel("affine", (0, 1))], [PlanBuffer(8 * N, "output", read_only), bound])
    with pytest.raises(LaunchError, match="a constant of the plan"):
        ExecutionPlan([kernel("affine", (1, 0))], [out, PlanBuffer(8 * N, "constant", x)])
    with pytest.raises(LaunchError, match="is constant and has no array"):
        ExecutionPlan([], [PlanBuffer(8, "constant")])
    with pytest.raises(LaunchError, match="order them by level"):
        ExecutionPlan([kernel("affine", (0, 1), level=1), kernel("affine", (0, 1), level=0)], [out, bound])
    phases = (PhaseSpec("a", N, 1, 0), PhaseSpec("b", N, 1, 0, True))
    late = PreparedKernel(ProgramSpec("p", ((dtypes.int64, N),), (0,), (), phases), loop_kernels.loaded("count", "touch"), (0,))
    with pytest.raises(LaunchError, match="must come before"):
        ExecutionPlan([late], [out])
    plan = ExecutionPlan([kernel("affine", (0, 1))], [out, PlanBuffer(8 * N, "input")])
    with pytest.raises(LaunchError, match=r"inputs \[1\] of the plan have no memory"):
        plan.execute()
    with pytest.raises(LaunchError, match="cannot be bound"):
        plan.bind_array(5, array())
    with pytest.raises(LaunchError, match="needs 776 bytes"):
        plan.bind_array(1, array(n=3))


def test_kernels_of_a_level_leave_each_others_memory_alone():
    shared = array(n=2 * N)
    buffers = [PlanBuffer(8 * N, "output", array()), PlanBuffer(8 * N, "output", array()), PlanBuffer(8 * N, "input", array()),
               PlanBuffer(8 * N, "output", shared[:N]), PlanBuffer(8 * N, "input", shared[N - 1:-1]), PlanBuffer(8 * N, "intermediate")]

    def plan(*kernels):
        return ExecutionPlan([kernel("affine", buffers, level=level) for *buffers, level in kernels], buffers)

    for what, *kernels in [("buffer 0", (0, 2, 0), (0, 2, 0)), ("buffer 0", (0, 2, 0), (1, 0, 0)), ("buffer 0", (1, 0, 0), (0, 2, 0)),
                           ("the memory under buffers 3 and 4", (3, 2, 0), (0, 4, 0)),
                           ("the memory under buffers 3 and 4", (0, 4, 1), (3, 2, 1))]:
        with pytest.raises(LaunchError, match=f"share level . and {what}, which the first writes"):
            plan(*kernels)
    with pytest.raises(LaunchError, match="reads buffer 5, an intermediate that no kernel before it writes"):
        plan((0, 5, 0), (5, 2, 1))
    for kernels in [((0, 2, 0), (1, 2, 0)), ((0, 2, 0), (1, 0, 1)), ((3, 4, 0), (0, 2, 0)), ((3, 2, 0), (0, 4, 1)), ((0, 0, 0), (1, 2, 0))]:
        plan(*kernels)      # one buffer read by both, an order, memory shared inside one kernel


def test_a_single_core_plan_makes_no_threads():
    shared = Pool._shared
    before = threading.active_count()
    plan, y = diamond(1, (0, 1, 2))
    plan.bind_array(0, array(0))
    plan.execute()
    assert threading.active_count() == before and (y == 5).all()
    assert shared is None or Pool._shared is shared


def parts(start, *, late=0, intermediate=False):
    """Make a plan of two kernels on one level that write halves of buffer 1, the second from element `start` on, and a kernel that reads
    buffer 1."""
    whole = PlanBuffer(16 * N, "intermediate") if intermediate else PlanBuffer(16 * N, "output", array(n=2 * N))
    buffers = [PlanBuffer(8 * N, "input"), whole, PlanBuffer(8 * N, "output", array(-1))]
    kernels = [kernel("affine", (1, 0), level=0, offsets=(8 * k, 0), regions=(Region(8 * k, 8 * N), Region(0, 8 * N))) for k in (0, start)]
    kernels.append(kernel("affine", (2, 1), level=1 - late, offsets=(0, 8 * N), regions=(Region(0, 8 * N), Region(8 * N, 8 * N))))
    return ExecutionPlan(kernels, buffers, [2], threads=2)


@pytest.mark.parametrize("intermediate", [False, True])
def test_kernels_of_a_level_write_parts_of_one_buffer(intermediate):
    plan = parts(N, intermediate=intermediate)
    for seed in range(3):
        x = np.random.default_rng(seed).integers(-99, 99, N)
        plan.bind_array(0, x)
        plan.execute()
        assert (plan.outputs[0] == 9 * x + 4).all()
    if intermediate:
        assert plan.release_intermediate_buffers()
    else:
        plan.bind_array(1, moved := array(n=2 * N))
    plan.execute()
    assert (plan.outputs[0] == 9 * x + 4).all()
    assert intermediate or (moved == np.tile(3 * x + 1, 2)).all()


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(LaunchError, match="share level 0 and buffer 1"):
        parts(N - 1)
    with pytest.raises(LaunchError, match=f"need {8 * N} bytes after byte {8 * N + 8}; buffer 1 has {16 * N}"):
        parts(N + 1)
    with pytest.raises(LaunchError, match="share level 0 and buffer 1"):
        parts(N, late=1)


def test_interleaved_parts_are_told_from_overlapping_ones():
    """Two kernels that write different columns of a matrix are accepted: their address intervals overlap, their elements do not."""
    def plan(*columns):
        kernels = [kernel("affine", (0, 1), level=0, offsets=(8 * c, 0), regions=(Region(8 * c, 8, ((8 * 4, N),)), Region(0, 8 * N)))
                   for c in columns]
        return ExecutionPlan(kernels, [PlanBuffer(8 * 4 * N, "output", array(n=4 * N)), PlanBuffer(8 * N, "input", array())], [0])
    plan(0, 1, 2, 3)
    with pytest.raises(LaunchError, match="share level 0"):
        plan(0, 3, 1, 3)
