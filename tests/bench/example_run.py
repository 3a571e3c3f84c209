"""Made-up runs with every field of a result file: `python -m tests.bench.example_run` writes them to data/*.json.

The times are drawn from a seed, near the times that kernels of these sizes take; no machine was measured.
"""
from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

from svod.bench.ceiling_loops import CurvePoint
from svod.bench.results import CaseResult, ContestantResult, KernelInfo, Load, Machine, PeerInfo, Run, RunSettings, write_run
from svod.bench.roofline import Ceilings
from svod.bench.summary import Timed, group_results, judge_case, neighbour_of, suite_results
from svod.compile.cpu.host import make_target
from svod.core.ir.dtype import BY_NAME, dtypes

DATA = Path(__file__).parent / "data"
MACHINE = make_target("x86_64", "znver5", ("avx2", "avx512f", "bf16", "f16c", "fma", "sse4", "vbmi", "vnni"),
                      (48 << 10, 1 << 20, 32 << 20), 2)
CEILINGS = Ceilings(
    MACHINE.key, 2, False, {"float32": (258e9, 512e9), "float64": (129e9, 256e9)},
    {"l1": {"read": (480e9, 960e9), "write": (250e9, 500e9), "copy": (400e9, 800e9)},
     "l2": {"read": (210e9, 420e9), "write": (120e9, 240e9), "copy": (150e9, 300e9)},
     "l3": {"read": (90e9, 170e9), "write": (60e9, 110e9), "write_stream": (30e9, 45e9), "copy": (75e9, 140e9),
            "copy_stream": (35e9, 50e9)},
     "memory": {"read": (39e9, 52e9), "write": (18e9, 25e9), "write_stream": (28e9, 38e9), "copy": (26e9, 36e9),
                "copy_stream": (33e9, 44e9)}},
    (2e-8, 2.1e-7),
    tuple(CurvePoint(size << 10, read, copy) for size, read, copy in (
        (64, 960e9, 800e9), (1 << 10, 420e9, 300e9), (16 << 10, 170e9, 140e9), (48 << 10, 52e9, 44e9))))
GEMM_CHAIN = (("UPCAST", "o0", 8), ("UPCAST", "o1", 32), ("LANES", "o1"), ("STAGE", "s0.b", "o1"), ("THREAD", "o0", 2))
ROW_CHAIN = (("UPCAST", "r0", 64), ("LANES", "r0"), ("THREAD", "o0", 2))

# name, title, suite, group, dtype, shapes, flops, bytes read, bytes written, µs of heuristic, tuned, numpy, torch, onnxruntime, jax, spread
CASES = [
    ("gemm_256", "GEMM 256", "core", "gemm", "float32", "256×256 · 256×256", 2 * 256 ** 3, 2 * 256 ** 2 * 4, 256 ** 2 * 4,
     (95, 78, 151, 160, 84, 102), 0.01),
    ("gemm_1024", "GEMM 1024", "core", "gemm", "float32", "1024×1024 · 1024×1024", 2 * 1024 ** 3, 2 * 1024 ** 2 * 4, 1024 ** 2 * 4,
     (5600, 4420, 9800, 9700, 4610, 4700), 0.01),
    ("gemm_1024_bf16", "GEMM 1024 bfloat16", "core", "gemm", "bfloat16", "1024×1024 · 1024×1024", 2 * 1024 ** 3, 2 * 1024 ** 2 * 2,
     1024 ** 2 * 2, (6100, 5600, None, 3200, None, 14400), 0.02),
    ("conv3x3_64_56", "conv 3×3 64→64 at 56²", "core", "conv", "float32", "1×64×56×56 ∗ 64×64×3×3", 2 * 56 * 56 * 64 * 64 * 9,
     (64 * 56 * 56 + 64 * 64 * 9) * 4, 64 * 56 * 56 * 4, (690, 505, 4100, 540, 560, 1300), 0.015),
    ("softmax_4096x1024", "softmax 4096×1024", "core", "rows", "float32", "4096×1024", 5 * 4096 * 1024, 4096 * 1024 * 4, 4096 * 1024 * 4,
     (860, 800, 15100, 1010, 1190, 2600), 0.03),
    ("layer_norm_4096x768", "layer norm 4096×768", "core", "rows", "float32", "4096×768", 8 * 4096 * 768, 4096 * 768 * 4, 4096 * 768 * 4,
     (510, 470, 6900, 530, 640, 1500), 0.02),
    ("sum_16m", "sum of 16 M", "core", "reduction", "float32", "16777216", 1 << 24, 4 << 24, 4, (1380, None, 2900, 1400, 1450, 1600), 0.05),
    ("gelu_4m", "GELU of 4 M", "core", "elementwise", "float32", "4194304", 8 << 22, 4 << 22, 4 << 22,
     (880, 860, None, 1500, 2300, 5200), 0.02),
    ("transpose_4096", "transpose 4096²", "core", "movement", "float32", "4096×4096", 0, 4 << 24, 4 << 24,
     (5100, 3900, 88000, 31000, 14000, 21000), 0.2),
    ("gemm_1000", "GEMM 1000", "odd", "gemm", "float32", "1000×1000 · 1000×1000", 2 * 1000 ** 3, 2 * 1000 ** 2 * 4, 1000 ** 2 * 4,
     (5900, 4480, 9900, 9900, 4700, 4900), 0.01),
]
WHY = "1.26× the heuristic when it was confirmed"
NAMES = ("heuristic", "tuned", "numpy", "torch", "onnxruntime", "jax")
UNSUPPORTED = {"numpy": "NumPy has no erf, no bfloat16", "onnxruntime": "MatMul is not implemented for bfloat16 on CPU"}


def example_run(slower: dict[str, float] | None = None, seed: int = 0) -> Run:
    """A made-up run; `slower` multiplies svod's times of a case."""
    rng = random.Random(seed)
    cases = tuple(_case(row, (slower or {}).get(row[0], 1.0), rng) for row in CASES)
    return Run(RunSettings("svod-bench run --suite core,odd --fresh --beam 4 --peers numpy,torch,onnxruntime,jax", "core,odd", "*", "beam",
                           4, True, 0, "2026-01-15T10:20:30Z", 212.4),
               Machine("bench-1", "AMD EPYC 9B45", "Linux 6.12", MACHINE.key, 2, 2, MACHINE.l1, MACHINE.l2, MACHINE.l3, 16 << 30),
               {"svod": "0.1.0", "codegen": "1", "compiler": "llvmlite 0.50.0, LLVM 22.1", "protocol": "1", "python": "3.12.3",
                "numpy": "2.4.0"},
               Load(0.31, 0.0, 0.004, 12, None), CEILINGS,
               (PeerInfo("numpy", "2.4.0", None, 2, "preallocated where the function takes out="),
                PeerInfo("torch", "2.13.0+cpu", None, 2, "preallocated where the function takes out="),
                PeerInfo("onnxruntime", "1.24.1", None, 2, "bound once, reused"),
                PeerInfo("jax", "0.9.0", None, 2, "a new array every run"),
                PeerInfo("tensorrt", None, "not installed", None, "")),
               cases, group_results(cases), suite_results(cases))


def _case(row: tuple[object, ...], factor: float, rng: random.Random) -> CaseResult:
    name, title, suite, group, dtype, shapes, flops, read, written, micros, spread = row
    assert isinstance(micros, tuple) and isinstance(spread, float) and isinstance(flops, int) and isinstance(read, int)
    assert isinstance(written, int) and isinstance(dtype, str)
    drift = [rng.gauss(1.0, 0.02) for _ in range(15)]
    timed: list[Timed] = []
    for contestant, value in zip(NAMES, micros, strict=True):
        svod = contestant in ("heuristic", "tuned")
        kernels = (KernelInfo("4f2a9c0d1e5b77aa" if group == "gemm" else "9b13d5f7e2c44610", f"r_{name}", "bench.py:1",
                              (GEMM_CHAIN if group == "gemm" else ROW_CHAIN) if contestant == "tuned" else (("THREAD", "o0", 2),),
                              "beam" if contestant == "tuned" else "heuristic", WHY, flops, read + written),
                   ) if svod else ()
        searched = 2.0 + flops ** 0.1 if contestant == "tuned" else None
        if value is None and contestant == "tuned":
            same = ContestantResult("tuned", "ok", same_as="heuristic", preallocated=True, kernels=kernels, search_seconds=searched)
            timed.append(Timed(same, None))
        elif value is None:
            timed.append(Timed(ContestantResult(contestant, "unsupported", UNSUPPORTED.get(contestant, "")), None))
        else:
            seconds = [1e-6 * value * (factor if svod else 1.0) * d * max(0.5, rng.gauss(1.0, spread)) for d in drift]
            timed.append(Timed(ContestantResult(contestant, "ok", preallocated=contestant != "jax", error=2e-7, kernels=kernels,
                                                prepare_seconds=0.2 + (searched or 0.0) if svod else None,
                                                search_seconds=searched), seconds))
    bound = CEILINGS.bound(((BY_NAME[dtype], flops),), read, written, MACHINE)
    load = Load(0.3, 0.0, 0.0, 1, None)
    found = judge_case(name=str(name), title=str(title), suite=str(suite), group=str(group), dtype=dtype, shapes=str(shapes), flops=flops,
                       bytes_read=read, bytes_written=written, bound=bound, timed=timed, load=load)
    if suite == "odd":
        beside = [1e-6 * 4420 * d * rng.gauss(1.0, spread) for d in drift]
        found = replace(found, neighbour=neighbour_of(found, flops, "gemm_1024", "GEMM 1024", 2.0 * 1024 ** 3, beside))
    return found


def example_model_run() -> Run:
    """A run of the models suite with a plan of several kernels."""
    run = example_run()
    rng = random.Random(1)
    layers = [("conv1", 240e6), ("maxpool", 2e6), ("layer1.0.conv1", 231e6), ("layer1.0.conv2", 231e6), ("layer2.0.downsample", 25e6),
              ("layer2.0.conv1", 115e6), ("layer4.1.conv2", 231e6), ("avgpool", 5e4), ("fc", 1e6)]
    kernels = tuple(KernelInfo(f"{rng.getrandbits(64):016x}", f"r_{i}", origin, GEMM_CHAIN, "database", WHY, int(flops), 1 << 20)
                    for i, (origin, flops) in enumerate(layers))
    timed = []
    for name, micros, chains in (("heuristic", 12800, ()), ("tuned", 9100, GEMM_CHAIN)):
        seconds = [1e-6 * micros * rng.gauss(1.0, 0.01) for _ in range(15)]
        own = tuple(replace(k, chain=chains) for k in kernels)
        timed.append(Timed(ContestantResult(name, "ok", preallocated=True, error=3e-6, kernels=own), seconds))
    bound = CEILINGS.bound(((dtypes.float32, 3.6e9),), 46e6, 10e6, MACHINE)
    busy = "other processes used 12 % of the machine"
    case = judge_case(name="resnet18", title="ResNet-18 1×3×224×224", suite="models", group="models", dtype="float32", shapes="1×3×224×224",
                      flops=3.6e9, bytes_read=46e6, bytes_written=10e6, bound=bound, timed=timed,
                      load=Load(1.9, 0.0, 0.12, 30, busy))
    assert statistics.median(case.contestants[0].samples) > 0
    asked = replace(run.settings, suite="models", command="svod-bench run --suite models --beam 8", mode="beam", beam=8)
    return replace(run, settings=asked,
                   peers=(), cases=(case,), groups=group_results((case,)), suites=suite_results((case,)))


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    write_run(DATA / "run.json", example_run())
    write_run(DATA / "run_slower.json", example_run({"gemm_1024": 1.3}, seed=1))
    write_run(DATA / "resnet18.json", example_model_run())
