"""Tunes common layers of published models, for the records that ship with svod.

    python experiments/shipped.py --budget 450 --db shipped.db         # again, until it says that no kernel is left
    svod-db --db shipped.db export --winners --anonymous -o tune_db/TARGET.jsonl

Each run takes as many kernels as its budget gives `--seconds` each: those that were never searched, then those whose search was cut short.

Inference of one input in float32, batch norms folded into the convolutions before them, as exporters do it; weights are constants. No
kernel of the benchmarks or of the models beside this file is among them, so that a measurement of the search measures a search
(tests/tune/test_shipped.py).
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from svod import Tensor
from svod.bench.roofline import cached_ceilings
from svod.compile.backend import device_named
from svod.config import BeamConfig, BenchConfig, data_dir
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import HOST, Target
from svod.core.schedule.schedule import create_schedule
from svod.tune.db import Search, TuningDB
from svod.tune.search.budget import ModelBudget
from svod.tune.session import KernelTask, TuneSession
from svod.tune.unfinished import left_to_search
from svod.tune.workers.start import make_executor

Layer = Callable[[], Tensor]
Activation = Callable[[Tensor], Tensor]

IMAGES = 224
WEIGHTS: list[Tensor] = []      # options of the layer that is built


def floats(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32))


def weight(*shape: int) -> Tensor:
    """A constant of the model."""
    WEIGHTS.append(floats(*shape))
    return WEIGHTS[-1]


def same(x: Tensor) -> Tensor:
    return x


def conv(inputs: int, outputs: int, size: int, at: int, stride: int = 1, groups: int = 1, act: Activation = Tensor.relu,
         added: bool = False) -> Layer:
    """A convolution with bias over inputs × at × at; `added`: a shortcut is added before the activation."""
    def build() -> Tensor:
        y = floats(1, inputs, at, at).conv2d(weight(outputs, inputs // groups, size, size), weight(outputs), stride=stride,
                                             padding=size // 2, groups=groups)
        return act(y + floats(*y.shape) if added else y)
    return build


def linear(tokens: int, inputs: int, outputs: int, act: Activation = same, bias: bool = True, added: bool = False) -> Layer:
    def build() -> Tensor:
        y = floats(1, tokens, inputs).linear(weight(outputs, inputs), weight(outputs) if bias else None)
        return act(y) + floats(*y.shape) if added else act(y)
    return build


def rows(tokens: int, width: int, of: Activation) -> Layer:
    return lambda: of(floats(1, tokens, width))


def layer_norm(tokens: int, width: int) -> Layer:
    return lambda: floats(1, tokens, width).layer_norm((width,), weight(width), weight(width))


def rms_norm(tokens: int, width: int) -> Layer:
    return lambda: floats(1, tokens, width).rms_norm((width,), weight(width))


def attention(heads: int, tokens: int, width: int, causal: bool = False) -> Layer:
    return lambda: floats(1, heads, tokens, width).scaled_dot_product_attention(
        floats(1, heads, tokens, width), floats(1, heads, tokens, width), is_causal=causal)


def relu6(x: Tensor) -> Tensor:
    return x.clip(0.0, 6.0)


def resnet50() -> Iterator[Layer]:
    """https://arxiv.org/abs/1512.03385"""
    inputs = 64
    for stage, at in enumerate((56, 28, 14, 7)):
        width = 64 << stage
        yield conv(inputs, width, 1, at if stage == 0 else 2 * at)
        yield conv(width, width, 3, at if stage == 0 else 2 * at, stride=1 if stage == 0 else 2)
        yield conv(inputs, 4 * width, 1, at if stage == 0 else 2 * at, stride=1 if stage == 0 else 2, act=same)
        yield conv(width, 4 * width, 1, at, added=True)
        yield conv(4 * width, width, 1, at)
        yield conv(width, width, 3, at)
        inputs = 4 * width
    yield linear(1, 2048, 1000)


def mobilenet_v2() -> Iterator[Layer]:
    """https://arxiv.org/abs/1801.04381"""
    yield conv(3, 32, 3, IMAGES, stride=2, act=relu6)
    inputs, at = 32, 112
    for expand, outputs, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
                                           (6, 320, 1, 1)):
        for i in range(min(count, 2)):
            hidden, step = inputs * expand, stride if i == 0 else 1
            if expand > 1:
                yield conv(inputs, hidden, 1, at, act=relu6)
            yield conv(hidden, hidden, 3, at, stride=step, groups=hidden, act=relu6)
            at //= step
            yield conv(hidden, outputs, 1, at, act=same, added=i > 0)
            inputs = outputs
    yield conv(320, 1280, 1, at, act=relu6)


def encoder(tokens: int, width: int, heads: int, act: Activation = Tensor.gelu, causal: bool = False) -> Iterator[Layer]:
    """One block of a transformer with pre- or post-norm: projections, attention, the perceptron, the norm."""
    yield linear(tokens, width, width)
    yield attention(heads, tokens, width // heads, causal)
    yield linear(tokens, width, width, added=True)
    yield linear(tokens, width, 4 * width, act)
    yield linear(tokens, 4 * width, width, added=True)
    yield layer_norm(tokens, width)


def llama_1b(tokens: int) -> Iterator[Layer]:
    """Llama 3.2 1B, https://huggingface.co/meta-llama/Llama-3.2-1B: `tokens` at once."""
    yield rms_norm(tokens, 2048)
    yield linear(tokens, 2048, 2048, bias=False)
    yield linear(tokens, 2048, 512, bias=False)
    yield linear(tokens, 2048, 8192, bias=False)
    yield linear(tokens, 2048, 8192, Tensor.silu, bias=False)
    yield linear(tokens, 8192, 2048, bias=False, added=True)


MODELS: dict[str, Callable[[], Iterator[Layer]]] = {
    "ResNet-50": resnet50, "MobileNetV2": mobilenet_v2,
    "BERT large": lambda: encoder(128, 1024, 16),                                  # https://arxiv.org/abs/1810.04805
    "MiniLM-L6": lambda: encoder(128, 384, 12),                                    # https://arxiv.org/abs/2002.10957
    "ViT-B/16": lambda: encoder(197, 768, 12),                                     # https://arxiv.org/abs/2010.11929
    "Whisper base": lambda: encoder(1500, 512, 8),                                 # https://arxiv.org/abs/2212.04356
    "GPT-2 medium": lambda: encoder(256, 1024, 16, lambda x: x.gelu("tanh"), causal=True),
    "Llama 3.2 1B, prompt": lambda: llama_1b(128), "Llama 3.2 1B, one token": lambda: llama_1b(1)}


def kernels() -> dict[str, tuple[Kernel, str, str]]:
    """The kernels of all layers by key, each with its name and the model it comes from."""
    found: dict[str, tuple[Kernel, str, str]] = {}
    for model, layers in MODELS.items():
        for build in layers():
            WEIGHTS.clear()
            sink = graph.sink(build().uop)
            for call in create_schedule(sink, frozenset(base_of(w.uop) for w in WEIGHTS)).calls:
                kernel = Kernel(call.ast)
                if kernel.library_kernel is None:
                    found.setdefault(kernel.key, (kernel, call.name_hint, model))
    return found


def next_kernels(found: Iterable[str], target: Target, db: TuningDB, beam: BeamConfig, most: int) -> list[str]:
    """The kernels that come next, at most so many: those never searched, then those with something left to search, the least searched
    first."""
    spent: dict[str, float] = {}
    for search, _ in db.select(Search, target=target.key):
        spent[search.kernel] = spent.get(search.kernel, 0.0) + float(search.result.get("seconds") or 0.0)
    left = [k for k in found if k not in spent or left_to_search(db, k, target.key, beam) is not None]
    return sorted(left, key=lambda k: (k in spent, spent.get(k, 0.0), k))[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=9.0, help="of a kernel, on average")
    parser.add_argument("--db", required=True)
    parser.add_argument("--beam", type=int, default=8)
    args = parser.parse_args()
    found, target = kernels(), device_named(HOST).backend.target()
    beam = BeamConfig(width=args.beam, budget=args.budget, kernel_budget=3 * args.seconds)
    with TuningDB.open(args.db) as db:
        chosen = next_kernels(found, target, db, beam, int(args.budget / args.seconds))
        print(f"{len(found)} kernels of {len(MODELS)} models, {len(chosen)} of them now", file=sys.stderr)
        if not chosen:
            return
        tasks = [KernelTask(kernel, name=name, origins=(model,)) for kernel, name, model in map(found.__getitem__, chosen)]
        with make_executor("local") as executor:
            ceilings = cached_ceilings(data_dir() / "ceilings.json", target, target.threads, quick=True)
            result = TuneSession(tasks, target, executor=executor, db=db, config=beam, bench=BenchConfig(), ceilings=ceilings,
                                 budget=ModelBudget(args.budget, beam.kernel_budget)).run()
    gains = sorted(f.speedup.median for f in result.findings.values() if f.confirmed)
    print(f"{len(gains)} confirmed, the median {gains[len(gains) // 2]:.2f}× the heuristic" if gains else "nothing was confirmed")


if __name__ == "__main__":
    main()
