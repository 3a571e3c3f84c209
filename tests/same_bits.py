"""Compares the bits of programs under the policy "same" (`svod.core.kernel.numerics`)."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from svod.compile.lower.lower import lower
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import SAME
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import from_float
from svod.errors import KernelOptError
from tests.agreement import Array, Case, has_native, run_native
from tests.chains import random_state
from tests.compile.native import AVX2, AVX512, runnable_targets

TARGETS = [replace(t, threads=threads, numerics=SAME) for t in (AVX2, AVX512) for threads in (1, 4)
           if t in runnable_targets().values()]
MOST_INSTRUCTIONS = 6000      # longer programs take LLVM seconds


def real_case(ast: UOp, seed: int = 0) -> Case:
    """A kernel with inputs whose sums round: numbers of both signs, of several magnitudes."""
    case = Case(Kernel(ast), seed)
    rng = np.random.default_rng(seed + 1)
    for slot, param in enumerate(case.kernel.params):
        if param.dtype.is_float:
            case.args[slot] = _reals(param.dtype, param.arg.size, rng)
    case.want = evaluate(case.kernel.ast, case.args, case.values)
    return case


def _reals(dtype: DType, size: int, rng: np.random.Generator) -> Array:
    return from_float(rng.uniform(-1, 1, size) * 2.0 ** rng.integers(-4, 2, size), dtype)


def bits_of(case: Case, state: Scheduler, slices: int = 1) -> list[bytes] | None:
    """The bytes of the outputs of a state's program; None if it is too long, or the machine cannot run it."""
    program = lower(state)
    if program.size > MOST_INSTRUCTIONS or not has_native(case, state.target):
        return None
    return [np.where(np.isnan(out), np.nan, out).astype(out.dtype).tobytes() if out.dtype.kind == "f" else out.tobytes()
            for out in run_native(case, program, state.target, slices)]


def compare_chains(name: str, case: Case, chains: int, more: Sequence[Scheduler] = ()) -> int:
    """Compare the bits of random chains, and of the states `more`, for all targets with those of the untouched kernel. Returns the number
    of states that ran."""
    want, ran = bits_of(case, Scheduler(case.kernel, TARGETS[0])), 0
    for number in range(chains + len(more)):
        rng = random.Random(f"same {name} {number}")
        target = TARGETS[number % len(TARGETS)]
        drawn = number < chains
        state = random_state(rng, Scheduler(case.kernel, target), rng.randint(0, 12)) if drawn else more[number - chains]
        try:
            got = bits_of(case, state, rng.randint(1, 4))
        except KernelOptError:      # placements that a later opt has moved
            continue
        assert got is None or got == want, \
            f"{name} {number}, {state.target.vector_bytes} bytes: {' '.join(map(str, state.applied_opts))}"
        ran += got is not None
    return ran
