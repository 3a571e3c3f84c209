"""svod beside PyTorch on one GPU of NVIDIA's, each library in a process of its own, in turns. PyTorch has cuBLAS, cuDNN, flash attention,
torch.compile and CUDA graphs.

    python experiments/cuda_peers.py --torch /path/to/bin/python [--only gemm_4096,softmax]
    python experiments/cuda_peers.py --torch … --tune 120                   svod searches each case with beam 4 for 120 s before
    python experiments/cuda_peers.py --torch … --device CPU --small         whether the script works, where there is no GPU

A round times some calls of each by the device's events; arguments lie on the device. What is printed is the median time of a call over the
rounds, and that of the ratios round by round, PyTorch's time over svod's, with its quartiles and the goal. Results are compared first.
`stream` is beside PyTorch's copy of as many bytes; `plan` beside a CUDA graph of the same kernels. Winners are kept in SVOD_TUNE_DB.
"""
from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peer_process import Peer, peers, serve

Array = np.ndarray[Any, Any]
ROUNDS, SECONDS = 15, 0.05      # a sample takes about so long
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}       # of the largest result
KERNELS = 100


class Case(NamedTuple):
    """`function(functional, x, weights)` of tensors of either library. `how`: what PyTorch does with it: eager, compiled, graph or copy."""

    function: Callable[[Any, list[Any], list[Any]], Any]
    inputs: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]
    dtype: str
    goal: float
    how: str = "eager"


def cases(small: bool) -> dict[str, Case]:
    """All cases; `small`: of sizes that a processor computes quickly."""
    def size(n: int, least: int) -> int:
        return least if small else n
    rows, columns, hidden, tokens = size(8192, 16), size(4096, 64), size(768, 96), size(1024, 16)
    channels, side, batch = size(256, 8), size(28, 7), size(32, 1)
    flash, heads = (1, 2, 16, 8) if small else (8, 16, 2048, 64), 2 if small else 12
    n, m, k = size(4096, 48), size(8192, 64), size(64, 16)
    half = "bfloat16"

    def normed(f: Any, x: list[Any], w: list[Any]) -> Any:
        return f.layer_norm(x[0], (columns,), w[0], w[1])

    def chain(f: Any, x: list[Any], w: list[Any]) -> Any:
        y = x[0]
        for _ in range(KERNELS):
            y = y @ w[0]
        return y
    return {
        "gemm_4096": Case(lambda f, x, w: x[0] @ w[0], ((n, n),), ((n, n),), half, 0.8),
        "gemm_8192": Case(lambda f, x, w: x[0] @ w[0], ((m, m),), ((m, m),), half, 0.8),
        "stream": Case(lambda f, x, w: f.relu(x[0]), ((4 * rows, columns),), (), "float32", 0.9, "copy"),
        "softmax": Case(lambda f, x, w: f.softmax(x[0], dim=-1), ((rows, columns),), (), "float32", 1.0),
        "layer_norm": Case(normed, ((rows, columns),), ((columns,), (columns,)), "float32", 1.0),
        "rms_norm": Case(lambda f, x, w: f.rms_norm(x[0], (columns,), w[0]), ((rows, columns),), ((columns,),), "float32", 1.0),
        "conv": Case(lambda f, x, w: f.conv2d(x[0], w[0], padding=1), ((batch, channels, side, side),), ((channels, channels, 3, 3),),
                     half, 0.5),
        "attention": Case(lambda f, x, w: f.scaled_dot_product_attention(*x, is_causal=True), (flash,) * 3, (), half, 0.5),
        "gpt2_block": Case(lambda f, x, w: gpt2_block(f, x[0], w, heads), ((1, tokens, hidden),), gpt2_weights(hidden), half, 0.0,
                           "compiled"),
        "resnet50": Case(resnet50, ((batch, 3, size(224, 32), size(224, 32)),), tuple(resnet_weights()), half, 0.0, "compiled"),
        "plan": Case(chain, ((k, k),), ((k, k),), "float32", 1 / 1.2, "graph"),
    }


# -- models, by functions that both libraries have ------------------------------------------------------
def gpt2_weights(hidden: int) -> tuple[tuple[int, ...], ...]:
    pairs = [((width, hidden), (width,)) for width in (3 * hidden, hidden, 4 * hidden)] + [((hidden, 4 * hidden), (hidden,))]
    return (*[(hidden,)] * 4, *[shape for pair in pairs for shape in pair])


def gpt2_block(f: Any, x: Any, w: list[Any], heads: int) -> Any:
    """One block of GPT-2 (Radford et al., 2019)."""
    n, tokens, hidden = x.shape
    together = f.linear(f.layer_norm(x, (hidden,), w[0], w[1]), w[4], w[5])
    q, k, v = (together[:, :, i * hidden:(i + 1) * hidden].reshape(n, tokens, heads, hidden // heads).transpose(1, 2) for i in range(3))
    y = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, tokens, hidden)
    x = x + f.linear(y, w[6], w[7])
    y = f.gelu(f.linear(f.layer_norm(x, (hidden,), w[2], w[3]), w[8], w[9]), approximate="tanh")
    return x + f.linear(y, w[10], w[11])


def resnet_convolutions() -> Iterator[tuple[int, int, int, int, str]]:
    """(inputs, outputs, size, stride, place) of each convolution of ResNet-50 (He et al., 2015) in order."""
    yield 3, 64, 7, 2, "first"
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            if not block:
                yield inputs, 4 * width, 1, stride, "shortcut"
            yield inputs, width, 1, 1, "begin"
            yield width, width, 3, stride, "middle"
            yield width, 4 * width, 1, 1, "end"
            inputs = 4 * width


def resnet_weights() -> Iterator[tuple[int, ...]]:
    for inputs, outputs, size, _, _ in resnet_convolutions():
        yield outputs, inputs, size, size
        yield 1, outputs, 1, 1          # the norm's offset; its gain is in the weights
    yield 1000, 2048


def resnet50(f: Any, given: list[Any], w: list[Any]) -> Any:
    waiting, x = iter(w), given[0]
    shortcut = before = x
    for _, _, size, stride, place in resnet_convolutions():
        source = before if place == "shortcut" else x
        y = f.conv2d(source, next(waiting), stride=stride, padding=size // 2) + next(waiting)
        if place == "first":
            x = before = shortcut = f.max_pool2d(f.relu(y), 3, stride=2, padding=1)
        elif place == "shortcut":
            shortcut = y
        elif place == "end":
            x = before = shortcut = f.relu(y + shortcut)
        else:
            x = f.relu(y)
    return f.linear(x.mean((2, 3)), next(waiting))


# -- what answers in each process ----------------------------------------------------------------------
def arrays_of(case: Case) -> list[Array]:
    """Inputs, then weights, the same in both processes."""
    rng = np.random.default_rng(1)
    drawn = [rng.standard_normal(shape, dtype=np.float32) for shape in (*case.inputs, *case.weights)]
    return [a / max(1.0, float(np.prod(a.shape[1:])) ** 0.5) if i >= len(case.inputs) and a.ndim > 1 else a for i, a in enumerate(drawn)]


class Svod:
    """svod: a plan over the device's memory."""

    def __init__(self, device: str, seconds: float) -> None:
        from svod.config import BeamConfig, PrepareConfig
        search = {"beam": BeamConfig(width=4, budget=seconds)} if seconds else {}
        self.config = PrepareConfig.from_env(device=device, **search)

    def prepare(self, case: Case) -> Array:
        import svod.nn.functional as functional
        from svod import Tensor
        tensors = [Tensor(a).cast(case.dtype).realize() for a in arrays_of(case)]
        count = len(case.inputs)
        result = case.function(functional, tensors[:count], tensors[count:])
        self.plan = result.prepare(self.config, constants=tensors[count:])
        self.plan.execute()
        wide = Tensor(self.plan.outputs[0].view(np.uint16) if case.dtype == "bfloat16" else self.plan.outputs[0])
        return (wide.bitcast("bfloat16").cast("float32") if case.dtype == "bfloat16" else wide).numpy()

    def sample(self, times: int) -> float:
        start = time.perf_counter()
        seconds = self.plan.repeat_timed(times)
        return time.perf_counter() - start if seconds is None else seconds


class Torch:
    """PyTorch: a function, timed by events."""

    def __init__(self, device: str) -> None:
        torch = self.torch = importlib.import_module("torch")
        torch.set_grad_enabled(False)
        self.device = "cpu" if device == "CPU" else device.lower()

    def prepare(self, case: Case) -> Array:
        torch, count = self.torch, len(case.inputs)
        tensors = [torch.from_numpy(a).to(self.device, getattr(torch, case.dtype)) for a in arrays_of(case)]
        functional = importlib.import_module("torch.nn.functional")

        def plain() -> Any:
            return case.function(functional, tensors[:count], tensors[count:])
        result = plain()
        self.function: Callable[[], Any] = plain
        if case.how == "copy":
            into = torch.empty_like(tensors[0])
            self.function = lambda: into.copy_(tensors[0])
        elif case.how == "compiled":
            self.function = torch.compile(plain)
        for _ in range(3):
            self.function()
        if case.how == "graph" and self.device != "cpu":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                plain()
            self.function = graph.replay
        return np.asarray(result.float().cpu().numpy())

    def sample(self, times: int) -> float:
        torch = self.torch
        if self.device == "cpu":
            start = time.perf_counter()
            for _ in range(times):
                self.function()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(times):
            self.function()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def answer(library: Any, known: dict[str, Case], asked: str | int) -> Any:
    """The result of a case, or the seconds of so many calls of the one that was asked for last."""
    if isinstance(asked, int):
        return library.sample(asked)
    got = library.prepare(known[asked]).astype(np.float64).ravel()
    return got[:: max(1, got.size // 997)].tolist()


# -- who asks ---------------------------------------------------------------------------------------------
def calls_of_a_sample(peer: Peer) -> int:
    """How many calls take about SECONDS."""
    times = 1
    while (seconds := peer.ask(times)) < SECONDS and times < 1 << 14:
        times = max(2 * times, int(times * SECONDS / max(seconds, 1e-6) / 2))
    return times


def commands(args: argparse.Namespace) -> list[tuple[list[str], dict[str, str]]]:
    """svod's process and PyTorch's."""
    here, shared = str(Path(__file__).resolve()), ["--device", args.device, *(["--small"] if args.small else [])]
    return [([sys.executable, here, "--serve", "svod", "--tune", str(args.tune), *shared], {}),
            ([args.torch, here, "--serve", "torch", *shared], {"PYTHONPATH": ""})]


def compare(name: str, case: Case, both: list[Peer]) -> str:
    """A line of the table."""
    ours, theirs = (np.array(p.ask(name)) for p in both)
    apart = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not apart <= TOLERANCE[case.dtype]:
        return f"{name:<12} the results differ by {apart:.2g} of the largest"
    turns = [(p, calls_of_a_sample(p)) for p in both]
    rounds = [[p.ask(n) / n for p, n in (turns if i % 2 else turns[::-1])][:: 1 if i % 2 else -1] for i in range(ROUNDS)]
    low, ratio, high = statistics.quantiles([t / s for s, t in rounds], n=4)
    seconds = [1e6 * statistics.median(column) for column in zip(*rounds, strict=True)]
    goal = f"goal {case.goal:.2f}" if case.goal else ""
    return f"{name:<12} {seconds[0]:>10.1f} µs {seconds[1]:>10.1f} µs {ratio:>7.2f}×  ({low:.2f}–{high:.2f})  {case.how:<9} {goal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", help="the Python that has PyTorch for CUDA")
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(cases(True))} (all)")
    parser.add_argument("--device", default="CUDA", help="CUDA, CUDA:1, … or CPU (CUDA)")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="svod searches for so long before, with beam 4 (0: not)")
    parser.add_argument("--serve", choices=("svod", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(lambda: partial(answer, Svod(args.device, args.tune) if args.serve == "svod" else Torch(args.device), cases(args.small)))
        return
    if not args.torch:
        parser.error("--torch PYTHON is needed")
    known = cases(args.small)
    print(f"{'':<12} {'svod':>13} {'PyTorch':>13} {'PyTorch / svod':>8}")
    with peers(*commands(args)) as both:
        for name in args.only.split(",") if args.only else known:
            print(compare(name, known[name], both), flush=True)


if __name__ == "__main__":
    main()
