"""The benchmark suites.

    core     kernels of models, at the sizes they have there
    odd      kernels with odd extents, each with a round neighbour to compare its rate with
    models   the whole models of experiments/models
    onnx     real ONNX files (`onnx_files.py`), each library in a process of its own
    torch    PyTorch modules (`torch_modules.py`), each library in a process of its own
    gpu      kernels of the kinds of core that fill a GPU, in its types (`gpu_kernels.py`)
    random   kernels of the kinds of core, with extents drawn from a seed (`random_kernels.py`)
    blocks   blocks of layers of PyTorch, drawn from a seed, each library in a process of its own (`svod/bench/blocks`)
"""
from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from svod.bench.blocks.families import BLOCK_COUNT, BLOCK_SUITE, FAMILIES, SLOWNESS_LIMIT, block_cases
from svod.bench.suites import cases
from svod.bench.suites.cases import Case
from svod.bench.suites.gpu_kernels import GPU, gpu_cases
from svod.bench.suites.onnx_files import onnx_cases
from svod.bench.suites.random_kernels import RANDOM, RANDOM_COUNT, random_cases
from svod.bench.suites.torch_modules import torch_cases
from svod.errors import ConfigError


def _square(n: int, dtype: str = "float32", *, suite: str = "core") -> Case:
    suffix, words, group = ("", "", "gemm") if dtype == "float32" else (f"_{dtype}", f" {dtype}", "low precision")
    return cases.matmul(f"gemm_{n}{suffix}", f"GEMM {n}{words}", (n, n), (n, n), dtype, suite=suite, group=group)


CORE_CASES = (
    *map(_square, (256, 512, 1024, 2048)),
    cases.linear_gelu("gemm_bias_gelu", "GEMM + bias + GELU 512×768×3072", 512, 768, 3072),
    cases.matmul("bmm_12", "batched GEMM 12×512×64×512", (12, 512, 64), (12, 64, 512)),
    cases.matmul("gemv_4096", "GEMV 4096", (4096, 4096), (4096,)),
    cases.conv2d("conv3x3_64_56", "conv 3×3 64→64 at 56²", 64, 64, 3, 56),
    cases.conv2d("conv1x1_256_56", "conv 1×1 256→64 at 56²", 256, 64, 1, 56),
    cases.conv2d("conv7x7_s2_224", "conv 7×7 stride 2 3→64 at 224²", 3, 64, 7, 224, 2),
    cases.conv2d("conv_depthwise_112", "conv 3×3 depthwise 96 at 112²", 96, 96, 3, 112, groups=96),
    cases.softmax("softmax_4096x1024", "softmax 4096×1024", 4096, 1024),
    cases.layer_norm("layer_norm_4096x768", "layer norm 4096×768", 4096, 768),
    cases.attention("attention_12x512x64", "attention 12 heads × 512 × 64", 12, 512, 64),
    cases.reduction("sum_16m", "sum of 16 M", "sum", (1 << 24,), 0),
    cases.reduction("row_sum_4096", "row sums of 4096²", "sum", (4096, 4096), 1),
    cases.reduction("column_sum_4096", "column sums of 4096²", "sum", (4096, 4096), 0),
    cases.max_pool2d("max_pool_64_112", "max pool 3×3 64 at 112²", 64, 112),
    cases.gelu("gelu_4m", "GELU of 4 M", 1 << 22),
    cases.axpy("axpy_16m", "axpy of 16 M", 1 << 24),
    cases.transpose("transpose_4096", "transpose 4096²", 4096, 4096),
    *(_square(1024, dtype) for dtype in ("float16", "bfloat16", "int8")),
)

ODD = (
    replace(_square(1000, suite="odd"), neighbour=_square(1024)),
    replace(cases.matmul("gemm_197x768x3072", "GEMM 197×768×3072", (197, 768), (768, 3072), suite="odd"),
            neighbour=cases.matmul("gemm_192x768x3072", "GEMM 192×768×3072", (192, 768), (768, 3072))),
    replace(cases.matmul("gemm_255x513x127", "GEMM 255×513×127", (255, 513), (513, 127), suite="odd"),
            neighbour=cases.matmul("gemm_256x512x128", "GEMM 256×512×128", (256, 512), (512, 128))),
    replace(cases.matmul("gemm_1x4096x4096", "GEMM 1×4096×4096", (1, 4096), (4096, 4096), suite="odd"),
            neighbour=cases.matmul("gemv_4096", "GEMV 4096", (4096, 4096), (4096,))),
    replace(cases.conv2d("conv3x3_64_57", "conv 3×3 64→64 at 57²", 64, 64, 3, 57, suite="odd"),
            neighbour=cases.conv2d("conv3x3_64_56", "conv 3×3 64→64 at 56²", 64, 64, 3, 56)),
    replace(cases.conv2d("conv3x3_256_13", "conv 3×3 256→256 at 13²", 256, 256, 3, 13, suite="odd"),
            neighbour=cases.conv2d("conv3x3_256_16", "conv 3×3 256→256 at 16²", 256, 256, 3, 16)),
    replace(cases.softmax("softmax_50257", "softmax 64×50257", 64, 50257, suite="odd"),
            neighbour=cases.softmax("softmax_50176", "softmax 64×50176", 64, 50176)),
    replace(cases.reduction("sum_1000003", "sum of 1,000,003", "sum", (1_000_003,), 0, suite="odd"),
            neighbour=cases.reduction("sum_1m", "sum of 1 M", "sum", (1 << 20,), 0)),
    replace(cases.reduction("max_1000003", "maximum of 1,000,003", "max", (1_000_003,), 0, suite="odd"),
            neighbour=cases.reduction("max_1m", "maximum of 1 M", "max", (1 << 20,), 0)),
    replace(cases.reduction("row_sum_1000003", "row sums of 7×1,000,003", "sum", (7, 1_000_003), 1, suite="odd"),
            neighbour=cases.reduction("row_sum_1m", "row sums of 8×1 M", "sum", (8, 1 << 20), 1)),
)

MODEL_CASES = (
    cases.model("mlp", "perceptron 64×256", "mlp", "Perceptron", (64, 256), (64, 10)),
    cases.model("resnet18", "ResNet-18 1×3×224×224", "resnet18", "ResNet18", (1, 3, 224, 224), (1, 1000)),
    cases.model("bert_block", "BERT base block 1×128×768", "bert_block", "BertBlock", (1, 128, 768), (1, 128, 768)),
    cases.model("gpt2_block", "GPT-2 block 1×256×768", "gpt2_block", "Gpt2Block", (1, 256, 768), (1, 256, 768)),
)

SUITES: Mapping[str, Sequence[Case]] = {"core": CORE_CASES, "odd": ODD, "models": MODEL_CASES, "onnx": onnx_cases(), "torch": torch_cases(),
                                         GPU: gpu_cases(small=False)}
ALL_SUITES = ("core", "odd", "models")    # the suites that "all" stands for: their cases come with svod
SUITE_NAMES = (*ALL_SUITES, RANDOM, GPU, "onnx", "torch", BLOCK_SUITE)
SEEDED_SUITES = {RANDOM: RANDOM_COUNT, BLOCK_SUITE: BLOCK_COUNT}     # suite with cases drawn from a seed → the number of its cases


def parse_suites(text: str) -> tuple[str, ...]:
    """Parse names of suites joined by commas; "all" is `ALL_SUITES`. Raises ConfigError for other names."""
    names = dict.fromkeys(filter(None, (p.strip().lower() for p in text.split(","))))
    unknown = [n for n in names if n not in (*SUITE_NAMES, "all")]
    if unknown or not names:
        what = f"no suite {', '.join(map(repr, unknown))}" if unknown else f"no suite in {text!r}"
        raise ConfigError(f"there is {what}; the suites are {', '.join(SUITE_NAMES)}, joined by commas, and all: {', '.join(ALL_SUITES)}")
    return tuple(dict.fromkeys(s for n in names for s in (ALL_SUITES if n == "all" else (n,))))


def select_cases(suites: str, pattern: str = "*", *, seed: int = 0, count: int | None = None, small: bool = False,
                 limit: float = SLOWNESS_LIMIT) -> list[Case]:
    """The cases of `suites` (see `parse_suites`) whose names match one of the patterns, which are joined by commas; `*` and `?` work as
    in a shell, and a block may be written out. `seed` and `count` apply to `SEEDED_SUITES`, `small` to the suite gpu (small kernels),
    `limit` to the suite blocks (`Case.limit`). Raises ConfigError for an unknown suite and for a pattern without a match."""
    names = parse_suites(suites)
    made: dict[str, Callable[[], Sequence[Case]]] = {
        RANDOM: lambda: random_cases(RANDOM_COUNT if count is None else count, seed), GPU: lambda: gpu_cases(small),
        BLOCK_SUITE: lambda: block_cases(BLOCK_COUNT if count is None else count, seed, pattern, limit)}
    known = [c for name in names for c in (made[name]() if name in made else SUITES[name])]
    chosen: dict[str, Case] = {}
    for part in filter(None, (p.strip() for p in pattern.split(","))):
        matching = [c for c in known if c.name == part or fnmatch.fnmatchcase(c.name, part)]
        if not matching:
            elsewhere = [n for n, own in SUITES.items() if n not in names and any(fnmatch.fnmatchcase(c.name, part) for c in own)]
            hint = f"; --suite {elsewhere[0]} has it" if elsewhere else ""
            names_there = [c.name for c in known] or [f"block_{family}_SEED_NUMBER" for family in FAMILIES]
            raise ConfigError(f"no kernel of suite {suites!r} matches {part!r}{hint}. It has: {', '.join(names_there)}")
        chosen.update((c.name, c) for c in matching)
    if not chosen:
        raise ConfigError(f"no kernel was asked for ({pattern!r}); the suite {suites!r} has: {', '.join(c.name for c in known)}")
    return [c for c in known if c.name in chosen]
