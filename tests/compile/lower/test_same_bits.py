"""Under the policy "same" every chain of a kernel computes the same bits, with vectors of 32 and of 64 bytes, on one core and on several.

`pytest tests/compile/lower/test_same_bits.py -m slow --all` draws 200 chains of each kernel. The programs run in parts, as cores would."""
from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest

from svod import Variable
from svod.compile.lower.lower import lower
from svod.compile.plan.stages import lower_kernel
from svod.core.cost.sketch import heuristic, sketches
from svod.core.graph import graph
from svod.core.ir.uop import Ops
from svod.core.ir.variable import without_binds
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.opts.sums import check_sums
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.errors import KernelOptError
from svod.tensor.fft import rfft
from tests.agreement import Case
from tests.chains import random_state
from tests.core.corpus import data, gemm, kernel_of
from tests.hand_kernels import SIZED
from tests.interpreted import interpret
from tests.same_bits import KERNELS, TARGETS, bits_of, compare_chains, real_case

VARIABLE = {
    "sums": lambda: data(13, 170)[:Variable("n", 1, 13), :Variable("m", 1, 170)].sum(1),
    "long sums": lambda: data(2, 9000)[:, :Variable("m", 1, 9000)].sum(1),
    "softmax": lambda: data(13, 170)[:, :Variable("m", 1, 170)].softmax(-1),
    "gemm": lambda: data(13, 700)[:Variable("n", 1, 13), :Variable("m", 1, 700)] @ data(700, 9)[:Variable("m", 1, 700)],
    "gemv": lambda: data(13, 170)[:, :Variable("m", 1, 170)] @ data(170)[:Variable("m", 1, 170)],
}
LIBRARY = {
    "cumsum": lambda: data(3, 300).cumsum(1),
    "logcumsumexp": lambda: data(2, 700).logcumsumexp(1),
    "fft": lambda: rfft(data(2, 240)),
}
EXTENTS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 64, 97)
pytestmark = pytest.mark.skipif(not TARGETS, reason="the machine runs no code for AVX2")


def check(name: str, chains: int) -> None:
    case = real_case(KERNELS[name]())
    started = [Scheduler(case.kernel, target) for target in TARGETS]
    ran = compare_chains(name, case, chains, [*map(heuristic, started), *started])
    assert ran >= 0.8 * chains, f"only {ran} programs ran"


@pytest.mark.parametrize("name", KERNELS)
def test_random_chains_and_heuristics_compute_the_same_bits(name: str) -> None:
    check(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_200_random_chains_compute_the_same_bits(name: str) -> None:
    check(name, 200)


@pytest.mark.parametrize("name", list(SIZED))
def test_random_extents(name: str) -> None:
    """Extents of 1, primes, and what no vector divides."""
    extents, build = SIZED[name]
    for number in range(3):
        rng = random.Random(f"{name} {number}")
        compare_chains(f"{name} {number}", real_case(build(*(rng.choice(EXTENTS) for _ in range(extents))), number), 4)


@pytest.mark.parametrize("name", VARIABLE)
def test_sizes_that_vary(name: str) -> None:
    """A reduce axis whose extent is a variable ends with masked accumulators, however long the vectors are."""
    sink, _, _ = without_binds(graph.sink(VARIABLE[name]().uop))
    ast = create_schedule(sink).calls[-1].ast
    for seed in range(2):
        rng = random.Random(f"{name} {seed}")
        case = real_case(ast, seed, {u.arg[0]: rng.randint(*u.arg[1:3]) for u in ast.walk(Ops.DEFINE_VAR)})
        found = set()
        for target in TARGETS:
            base = Scheduler(case.kernel, target)
            for state in (base, heuristic(base), random_state(rng, base, 6)):
                with suppress(KernelOptError):      # placements that a later opt has moved
                    args, program = case.fresh(), lower(state)
                    interpret(program, args, case.values, rng.randint(1, 3))
                    found.add(tuple(args[slot].tobytes() for slot in case.slots))
        assert len(found) == 1


@pytest.mark.parametrize("name", LIBRARY)
def test_library_kernels(name: str) -> None:
    """Their values do not depend on threads and lanes: running sums are added one by one."""
    calls = create_schedule(graph.sink(LIBRARY[name]().uop)).calls
    kernel = next(k for call in calls if (k := Kernel(call.ast)).library_kernel is not None)
    rng, found = np.random.default_rng(0), set()
    args = [rng.uniform(0.1, 1, p.arg.size).astype(np.float32) for p in kernel.params]
    for target in TARGETS:
        program = lower_kernel(kernel, target)
        given = [a.copy() for a in args]
        interpret(program, given)
        found.add(given[0].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("name", ["gemm_1024", "gemv_900", "softmax", "layer_norm", "conv3x3", "sum_rows"])
def test_sketches_keep_the_order(name: str) -> None:
    """A search begins with sketches: none of them computes other bits."""
    case = real_case(KERNELS[name]())
    found = [s for target in TARGETS[:1] for s in sketches(Scheduler(case.kernel, target))][:12]
    assert found and compare_chains(name, case, 0, found) == len(found)


def test_the_inputs_tell_orders_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, most chains that move the reduce axis compute other bits: the comparison above would find them."""
    case = real_case(kernel_of(gemm(5, 18, 200)))
    base = Scheduler(case.kernel, TARGETS[0])
    want = bits_of(case, base)
    monkeypatch.setattr("svod.core.kernel.apply.check_sums", lambda state: None)
    monkeypatch.setattr("svod.core.kernel.opts.sums.check_sums", lambda state: None)
    got = bits_of(case, apply_opt(base, Opt("UPCAST", "r0", 4)))
    assert got is not None and got != want


def test_the_check_passes_what_random_chains_reach() -> None:
    """Chains are checked as they grow; the whole state passes too."""
    kernel = Kernel(KERNELS["conv_64"]())
    for seed in range(20):
        check_sums(random_state(random.Random(seed), Scheduler(kernel, TARGETS[0]), 8))


def test_case_inputs_round() -> None:
    """The inputs are no halves of integers, whose sums would be exact in any order."""
    case = real_case(KERNELS["gemm"]())
    assert isinstance(case, Case) and any((a * 2 != (a * 2).round()).any() for a in case.args)
