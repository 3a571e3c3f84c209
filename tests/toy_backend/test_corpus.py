"""Random chains with loops bound to the threads of a group, over the corpus: right numbers and no faults on the toy device."""
from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from svod.compile.lower.lower import lower
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.spec.values import to_float
from svod.errors import KernelOptError
from tests.agreement import Case
from tests.chain_runs import KERNELS, VARIABLE, case_of, draw_groups, draw_variable, each_part, part_of, run_chains
from tests.core.corpus import data, kernel_of
from tests.draws import a_half, chains, count
from tests.toy_backend.running import check, is_short, run
from tests.toy_backend.target import TOY


def test_right_results_tell_kernels_from_zeros() -> None:
    assert not [name for name in KERNELS if not any(to_float(w, case_of(name).kernel.params[slot].dtype).any()
                                                    for slot, w in zip(case_of(name).slots, case_of(name).want, strict=True))]


@each_part
def test_random_chains_on_groups(part: int) -> None:
    run_chains("groups", part_of(part), chains(0.3), draw_groups(TOY, 8), run, {"ran": 0.6, "groups": 0.45, "shared": 0.08})


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
    """Threads of a stage in shared memory compute positions past those that its readers use; their own operands must exist there."""
    case = case_of(name)
    program = lower(apply_opts(Scheduler(case.kernel, TOY), [Opt.from_json(o) for o in chain]))
    check(case, program, 1)


@pytest.mark.parametrize(("axis", "threads"), a_half([(0, (4, 8)), (0, (8, 4)), (1, (4, 8)), (1, (8, 4)), (1, (4, 1)), (0, (1, 8))]))
def test_threads_of_a_column_are_no_neighbours(axis: int, threads: tuple[int, int]) -> None:
    """As many threads as there are for the positions of a row or column, for which its maximum and its sum are the same, share them: of a
    row they are neighbours, of a column each has threads of others beside it."""
    kernel = Kernel(kernel_of(data(8, 16).softmax(axis)))
    chain = [Opt("LOCAL", "o0", threads[0]), Opt("LOCAL", "o1", threads[1]),
             *[Opt("GROUP", f"{s.name}.r0", threads[axis]) for s in kernel.stages if s.has_reduce]]
    state = apply_opts(Scheduler(kernel, replace(TOY, group_threads=1024)), [o for o in chain if o.arg > 1])
    program = lower(state)
    check(Case(kernel), program)
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
        if is_short(program):
            check(case, program, seed)
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
    run_chains("groups, variables", [name], count(6), draw_variable(TOY), run, {"ran": 0.5})
