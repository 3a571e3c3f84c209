"""Sample records for the tests of the database: measurements of candidates, verdicts and descriptions of kernels."""
from __future__ import annotations

from typing import Any

from svod.tune.db import FormTimes, KernelRecord, Measurement, PlanTimes, Record, Rounding, Verdict

TARGET = "x86_64/znver5/avx2,avx512f/l1 48k/l2 1m/l3 32m/t2"
OTHER = "x86_64/znver5/avx2,avx512f/l1 48k/l2 1m/l3 32m/t8"
CHAIN = (("UPCAST", "o0", 8), ("ORDER", "o0", ("o0", "r0")), ("NOLOCALS", None, None))


def confirmed(ratio: float = 0.5, linear: str = "aa", kernel: str = "k" * 32, target: str = TARGET, **changes: Any) -> Measurement:
    """A confirmed measurement: `ratio` of the heuristic's 100 µs, with an interval of ± 0.5 %."""
    fields: dict[str, Any] = {
        "chain": CHAIN, "status": "ok", "codegen": 1, "compiler": "LLVM 22.1", "protocol": 1, "step": "confirm", "time": 1e-4 * ratio,
        "baseline": 1e-4, "ratio": ratio, "ratio_low": ratio * 0.995, "ratio_high": ratio * 1.005, "samples": (1e-4 * ratio,) * 15,
        "host": {"load": 0.25}, "taken_at": 1.0e9}
    return Measurement(kernel, target, linear=linear, **{**fields, **changes})


def screened(linear: str, kernel: str = "k" * 32, target: str = TARGET, **changes: Any) -> Measurement:
    """A candidate that was only screened."""
    fields: dict[str, Any] = {"chain": CHAIN, "status": "ok", "codegen": 1, "compiler": "LLVM 22.1", "protocol": 1, "time": 1e-4,
                              "samples": (1e-4, 1.1e-4), "taken_at": 1.0e9}
    return Measurement(kernel, target, linear=linear, **{**fields, **changes})


def verdict(what: str = "verified", linear: str = "aa", kernel: str = "k" * 32, target: str = TARGET, codegen: int = 1,
            **changes: Any) -> Verdict:
    return Verdict(kernel, target, linear, what, codegen, **changes)


def winning(ratio: float = 0.5, linear: str = "aa", kernel: str = "k" * 32, target: str = TARGET, **changes: Any) -> list[Record]:
    """A confirmed measurement, its verification, and its kernel."""
    return [confirmed(ratio, linear, kernel, target, **changes), verdict("verified", linear, kernel, target),
            KernelRecord(kernel, name="gemm_512", ast={"nodes": [1, 2]}, ast_version=1, structure="s1", flops=2.0, bytes=3.0)]


def choice(*kernels: str, used: int = 1, target: str = TARGET, **changes: Any) -> list[Rounding]:
    """The records of a choice among kernels of a plan, of which the first `used` are rounded."""
    fields: dict[str, Any] = {
        "plan": "7a" * 16, "weights": "8b" * 16, "chain": (("ROUND", "out", "bfloat16"), ("UPCAST", "o0", 8)), "linear": "rr", "codegen": 1,
        "samples": "those of the first run of model.py", "max_error": 0.01, "error": 0.002, "before": 3e-4, "after": 1e-4,
        "plan_error": 0.003, "plan_before": 8e-4, "plan_after": 5e-4, "taken_at": 1.0e9}
    return [Rounding(kernel, target, used=i < used, **{**fields, **changes}) for i, kernel in enumerate(kernels)]


def form_times(ratio: float, kernel: str = "c" * 32, target: str = TARGET, **changes: Any) -> FormTimes:
    """The times of both forms of a convolution: `ratio` of the direct form's 100 µs, with an interval of ± 1 %."""
    fields: dict[str, Any] = {
        "plan": "7a" * 16, "described": "float32 convolution of 1×2×20000 with 2×1×301 in 2 groups", "lengths": (1024,), "codegen": 1,
        "compiler": "LLVM 22.1", "protocol": 1, "direct": 1e-4, "transformed": 1e-4 * ratio, "ratio": ratio, "ratio_low": ratio * 0.99,
        "ratio_high": ratio * 1.01, "taken_at": 1.0e9}
    return FormTimes(kernel, target, **{**fields, **changes})


def plan_times(ratio: float, kernel: str = "7a" * 16, target: str = TARGET, **changes: Any) -> PlanTimes:
    """The times of a plan by the rules, and with one alternative: `ratio` of the rules' 100 µs, with an interval of ± 1 %."""
    fields: dict[str, Any] = {
        "described": "plan of 3 calls", "alternatives": ("a1b2 float32 4×8 kept",), "untried": 2, "codegen": 1, "compiler": "LLVM 22.1",
        "protocol": 1, "by_rules": 1e-4, "otherwise": 1e-4 * ratio, "ratio": ratio, "ratio_low": ratio * 0.99, "ratio_high": ratio * 1.01,
        "taken_at": 1.0e9}
    return PlanTimes(kernel, target, **{**fields, **changes})
