"""Random chains with loops bound to the threads of a group, over the corpus: right numbers on the toy device, and nothing to report."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from svod import Variable
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.graph import graph
from svod.core.ir.uop import Ops
from svod.core.ir.variable import without_binds
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import LOOP, Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import to_float
from svod.errors import KernelOptError
from tests.agreement import Case, draw, steps
from tests.chains import MAX_EXPANDED, expanded, random_opt
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import count
from tests.hand_kernels import HAND
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY

KERNELS = {**CORPUS, **HAND}
CHAINS = 3                  # per kernel
MOST_STEPS = 40_000         # instructions of all threads, each about ten microseconds
AMOUNTS = (0, 2, 3, 4, 5, 8, 16)


@cache
def case_of(name: str) -> Case:
    return Case(Kernel(KERNELS[name]()))


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
    return Opt(op, row.name, rng.choice(AMOUNTS))


def group_state(rng: random.Random, state: Scheduler, length: int) -> Scheduler:
    """`state` after at most `length` random opts, about half of them for groups."""
    for _ in range(4 * length):
        if len(state.applied_opts) >= length:
            break
        try:
            following = apply_opt(state, group_opt(rng, state) if rng.random() < 0.5 else random_opt(rng, state))
        except KernelOptError:
            continue
        if expanded(following) <= MAX_EXPANDED:
            state = following
    return state


def steps_of_threads(program: Program) -> int:
    """About how many instructions all threads of all groups run."""
    return sum(phase.block * steps(Program(replace(program.spec, phases=(phase,)), (code,)))
               for phase, code in zip(program.spec.phases, program.code, strict=True))


@pytest.fixture(scope="module")
def ran() -> Iterator[Counter[str]]:
    """Chains by what became of them. Fails at the end of the module where few ran, or few of those in groups."""
    seen: Counter[str] = Counter()
    yield seen
    if seen["drawn"] >= 100:        # of a few that were picked by name all may be long
        assert seen["ran"] >= 0.6 * seen["drawn"], dict(seen)
        assert seen["groups"] >= 0.5 * seen["ran"] and seen["shared"] >= 0.1 * seen["ran"], dict(seen)


def test_right_results_tell_kernels_from_zeros() -> None:
    assert not [name for name in KERNELS if not any(to_float(w, case_of(name).kernel.params[slot].dtype).any()
                                                    for slot, w in zip(case_of(name).slots, case_of(name).want, strict=True))]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_random_chains_on_groups(name: str, ran: Counter[str]) -> None:
    case = case_of(name)
    for seed in range(count(CHAINS)):
        rng = random.Random(f"groups {name} {seed}")
        state = group_state(rng, Scheduler(case.kernel, TOY), rng.randint(1, 8))
        ran["drawn"] += 1
        try:
            program = lower(state)
        except KernelOptError:      # placements that an opt has moved since, or too much shared memory
            continue
        try:
            validate(program)
            if steps_of_threads(program) > MOST_STEPS:
                continue
            args = case.fresh()
            run_program(program, args, seed=seed)
            case.check(args, "toy device")
        except Exception as e:
            raise AssertionError(f"{name}: {[o.to_json() for o in state.applied_opts]}: {e}") from e
        phases = program.spec.phases
        ran.update(ran=1, groups=any(p.block > 1 for p in phases), shared=any(p.shared_bytes for p in phases))


N, M = Variable("n", 1, 13), Variable("m", 1, 17)
VARIABLE = {
    "rows": lambda: data(13, 17)[:N] * 2 + 1,
    "sums": lambda: data(13, 17)[:N, :M].sum(1),
    "softmax": lambda: data(13, 17)[:N, :M].softmax(-1),
    "gemm": lambda: data(13, 17)[:N, :M] @ data(17, 9)[:M],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chain"), [
    ("mean_var", [["LOCAL", "s1.o0", 5], ["STAGE", "s0", "o0"]]),
    ("log_softmax", [["STAGE", "s0", "o0"], ["LOCAL", "s3.o0", 3]]),
    ("attention_causal", [["LOCAL", "s2.o2", 0], ["LOCAL", "s3.o1", 5], ["LOCAL", "o0", 0], ["UPCAST", "o2", 0]]),
    ("softmax_columns", [["UPCAST", "s3.o0", 3], ["LOCAL", "o1", 5], ["LOCAL", "s3.o0", 2], ["STAGE", "s0", "o1"]]),
    ("differences", [["LOCAL", "o0", 4], ["UPCAST", "o0", 8], ["TILE", "s0.o0", 32], ["LOCAL", "s0.o0.in", 2]]),    # 36 of 64 positions
    ("hand_softmax_down", [["LOCAL", "s3.o0", 0], ["STAGE", "s2", "o0"]]),      # vectors of a copy that begins anywhere
    ("hand_softmax_down", [["UPCAST", "s3.o0", 2], ["LOCAL", "s3.o0", 2]]),     # vectors of a stage that does
    ("softmax_columns", [["UPCAST", "s3.o0", 2], ["LOCAL", "s3.o0", 2]]),
    ("constants_only", [["LOCAL", "s3.o0", 0], ["STAGE", "s1", "o1"]]),     # read by threads that go beyond in each iteration of a loop
    ("chained_rows", [["ONLINE", "s1", 2], ["LOCAL", "o0", 2], ["LOCAL", "s6.o0", 2], ["LOCAL", "s2.o0", 2]]),    # read in unlike ways
    ("differences", [["LOCAL", "o0", 4], ["UPCAST", "o0", 7], ["TILE", "s0.o0", 10], ["UPCAST", "s0.o0", 3], ["LOCAL", "s0.o0.in", 2]]),
    # vectors beyond the end of a row whose only loop is expanded; tiles of threads that cover 10 of the 20 positions
    ("constants_only", [["LOCAL", "o1", 4], ["UPCAST", "o1", 4], ["LOCAL", "s3.o0", 0], ["UPCAST", "s3.o1", 14]]),
    ("constants_only", [["GROUP", "r0", 8], ["UNROLL", "r0", 2], ["LOCAL", "s3.o0", 5], ["UPCAST", "s3.o0", 2]]),
    # loops inside the reduction that cover 18 of 14 positions
    ("constants_only", [["LOCAL", "o0", 2], ["STAGE", "s3", "o0"], ["LOCAL", "s3.o1", 2], ["TILE", "s3.o1", 3],
                        ["SWAP", "s3.o0", "s3.r0"]]),
])
def test_threads_that_compute_more_than_is_read(name: str, chain: list[Any]) -> None:
    """The threads of a stage in shared memory go beyond what its readers ask for; what they read there has to be there."""
    case = case_of(name)
    program = lower(apply_opts(Scheduler(case.kernel, TOY), [Opt.from_json(o) for o in chain]))
    args = case.fresh()
    run_program(program, args, seed=1)
    case.check(args, name)


@pytest.mark.parametrize(("axis", "threads"), [(0, (4, 8)), (0, (8, 4)), (1, (4, 8)), (1, (8, 4)), (1, (4, 1)), (0, (1, 8))])
def test_threads_of_a_column_are_no_neighbours(axis: int, threads: tuple[int, int]) -> None:
    """As many threads as there are for the positions of a row or column, for which its maximum and its sum are the same, share them: of a
    row they are neighbours, of a column each has threads of others beside it."""
    kernel = Kernel(kernel_of(data(8, 16).softmax(axis)))
    chain = [Opt("LOCAL", "o0", threads[0]), Opt("LOCAL", "o1", threads[1]),
             *[Opt("GROUP", f"{s.name}.r0", threads[axis]) for s in kernel.stages if s.has_reduce]]
    state = apply_opts(Scheduler(kernel, replace(TOY, group_threads=1024)), [o for o in chain if o.arg > 1])
    case, program = Case(kernel, 0), lower(state)
    args = case.fresh()
    run_program(program, args)
    case.check(args, str(chain))
    neighbours = axis == 1 or threads[1] == 1
    assert program.spec.phases[-1].block == threads[0] * threads[1] * (1 if neighbours else threads[axis])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_threads_of_a_row_share_its_reductions(seed: int) -> None:
    """Of all kernels that reduce rows and compute something for each element: several rows a group, the reductions of a row shared by the
    threads of its elements, and by others where there are not as many."""
    rng, alike = random.Random(f"rows {seed}"), 0
    for name in KERNELS:
        case = case_of(name)
        kernel = case.kernel
        inside = [s for s in kernel.stages if s.has_reduce and not s.is_output]
        if not inside or kernel.stages[kernel.output].has_reduce or len(kernel.stages[kernel.output].outs) < 2:
            continue
        threads, rows = rng.choice((2, 3, 4, 8)), rng.choice((2, 3, 4))
        last = len(kernel.stages[kernel.output].outs) - 1
        chain = [*[Opt("GROUP", f"{s.name}.r0", rng.choice((threads, threads, 2))) for s in inside],
                 Opt("LOCAL", f"o{last}", threads), Opt("LOCAL", f"o{last - 1}", rows)]
        rng.shuffle(chain)
        try:
            program = lower(apply_opts(Scheduler(kernel, TOY), chain))
        except KernelOptError:      # too few positions, or more threads than a group may have
            continue
        if steps_of_threads(program) <= MOST_STEPS:
            validate(program)
            args = case.fresh()
            run_program(program, args, seed=seed)
            case.check(args, f"{name}: {chain}")
            alike += program.spec.phases[-1].block == threads * rows and all(o.arg == threads for o in chain if o.op == "GROUP")
    assert alike >= 3, alike


def test_threads_that_do_not_reach_what_is_read() -> None:
    chain = [["GROUP", "r0", 8], ["UNROLL", "r0", 2], ["LOCAL", "s3.o0", 0]]
    state = apply_opts(Scheduler(case_of("constants_only").kernel, TOY), [Opt.from_json(o) for o in chain])
    with pytest.raises(KernelOptError, match="18 positions of s3 are read at a time; the loops of its axis cover 9"):
        lower(state)


@pytest.mark.parametrize("name", VARIABLE)
def test_extents_that_depend_on_variables(name: str) -> None:
    """Groups run over the most positions that there may be; those beyond the end are guarded."""
    sink, _, _ = without_binds(graph.sink(VARIABLE[name]().uop))
    call, = create_schedule(sink).calls
    kernel, ran = Kernel(call.ast), 0
    for seed in range(count(2 * CHAINS)):
        rng = random.Random(f"variable {name} {seed}")
        state = group_state(rng, Scheduler(kernel, TOY), rng.randint(0, 6))
        try:
            program = lower(state)
        except KernelOptError:
            continue
        validate(program)
        if steps_of_threads(program) > MOST_STEPS:
            continue
        values = {u.arg[0]: rng.randint(*u.arg[1:3]) for u in kernel.ast.walk(Ops.DEFINE_VAR)}
        numbers = np.random.default_rng(seed)
        args = [draw(p.dtype, p.arg.size, numbers, p.arg.vmin, p.arg.vmax) for p in kernel.params]
        want, = evaluate(kernel.ast, args, values)
        run_program(program, args, values, seed)
        chain = f"{values}: {[o.to_json() for o in state.applied_opts]}"
        np.testing.assert_allclose(args[kernel.outs[0]], want, rtol=1e-4, atol=1e-5, err_msg=chain)
        ran += 1
    assert ran >= CHAINS
