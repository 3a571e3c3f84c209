"""Compares the bits of programs under the policy "same" (`svod.core.kernel.numerics`)."""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

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
from svod.tensor import Tensor
from tests.agreement import Array, Case, has_native, run_native
from tests.chains import random_state
from tests.compile.native import AVX2, AVX512, runnable_targets
from tests.core.corpus import CORPUS, conv, data, gemm, kernel_of

TARGETS = [replace(t, threads=threads, numerics=SAME) for t in (AVX2, AVX512) for threads in (1, 4)
           if t in runnable_targets().values()]
MOST_INSTRUCTIONS = 6000      # longer programs take LLVM seconds
#: Kernels whose sums are long enough for blocks, with extents that tiles divide and such that they do not.
LONG: dict[str, Callable[[], Tensor]] = {
    "gemm_1000": lambda: gemm(5, 18, 1000),
    "gemm_1024": lambda: gemm(6, 33, 1024),
    "gemm_nt_800": lambda: data(5, 800) @ data(17, 800).transpose(0, 1),
    "gemv_900": lambda: data(19, 900) @ data(900),
    "vecmat_770": lambda: data(770) @ data(770, 19),
    "dot_30000": lambda: (data(30000) * data(30000)).sum(),
    "dot_140001": lambda: (data(140_001) * data(140_001)).sum(),
    "rows_262144": lambda: data(2, 1 << 18).sum(1),
    "rows_5003": lambda: data(3, 5003).sum(1),
    "rows_20480": lambda: data(3, 20480).sum(1),
    "columns_1024": lambda: data(1024, 33).sum(0),
    "middle_200": lambda: data(3, 200, 9).sum(1),
    "two_axes": lambda: data(70, 5, 70).sum((0, 2)),
    "conv_64": lambda: conv(64, 5, 6, 3, padding=1),
    "conv_5x5": lambda: conv(16, 17, 9, 5, padding=2),
    "softmax_5001": lambda: data(2, 5001).softmax(-1),
    "layer_norm_6400": lambda: data(2, 6400).layer_norm(6400, data(6400), data(6400)),
    "squares_5003": lambda: (data(3, 5003) * data(3, 5003)).sum(1),
    "product_77": lambda: data(3, 77).prod(1),
    "gemm_f16_1000": lambda: gemm(5, 18, 1000, "float16"),
    "gemm_bf16_1000": lambda: gemm(5, 18, 1000, "bfloat16"),
    "rows_f64_3000": lambda: data(3, 3000, dtype="float64").sum(1),
    "variance_5000": lambda: data(4, 5000).var(1),
    "attention_450": lambda: data(1, 2, 7, 16).scaled_dot_product_attention(data(1, 2, 450, 16), data(1, 2, 450, 16)),
}
CORE = ("gemm", "gemm_nt", "gemm_tn", "gemm_batched", "gemm_bias_relu", "gemm_gelu", "gemm_f16", "gemm_f64", "gemm_bf16", "gemv", "vecmat",
        "dot", "conv3x3", "conv_stride", "conv_wide_padding", "conv_depthwise", "conv1x1", "conv_bn_residual", "avg_pool",
        "global_avg_pool", "softmax", "softmax_columns", "log_softmax", "layer_norm", "rms_norm", "sum_rows", "sum_columns", "sum_all",
        "mean_var", "elementwise", "attention", "attention_causal")
KERNELS: dict[str, Callable[[], UOp]] = {name: CORPUS[name] for name in CORE}
KERNELS |= {name: partial(lambda build: kernel_of(build()), build) for name, build in LONG.items()}


def real_case(ast: UOp, seed: int = 0, values: Mapping[str, int] | None = None) -> Case:
    """A kernel with inputs whose sums round: numbers of both signs, of several magnitudes. `values`: of its variables."""
    case = Case(Kernel(ast), seed, values or {})
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
