"""svod beside PyTorch on one GPU of NVIDIA's, each library in a process of its own, in turns. PyTorch has cuBLAS, cuDNN, flash attention,
torch.compile and CUDA graphs.

    python experiments/cuda_peers.py --torch /path/to/bin/python [--only gemm_4096,softmax]
    python experiments/cuda_peers.py --torch … --tune 20 --seconds 300 --json ratios.json
    python experiments/cuda_peers.py --torch … --suite shapes               memory-bound kernels of two types, odd sizes and short rows
    python experiments/cuda_peers.py --torch … --device CPU --small         whether the script works, where there is no GPU

A round times some calls of each by the device's events; arguments lie on the device. Results are compared first. A line says the median
time of a call over the rounds, and the median of the ratios round by round, PyTorch's time over svod's, with its quartiles and the goal.
The goals that matter most come first. With `--tune`, svod then searches what has missed its goal, with beam 4 for so many seconds each,
and it is timed again; winners are kept in SVOD_TUNE_DB. All goals in a table come last, and the exit status is 1 where one was missed, or
something has failed or was not reached within `--seconds`. `--json` is written anew after each case.

The products have the goal of the instructions that the device has: 0.8 with wgmma, else 0.6. Where there is wgmma, `…_mma` are the same
products in a process of svod's for sm_90, which has mma.sync only. `stream`, `add`, `row_sum` and `transpose` are beside PyTorch's copy of
as many bytes as they read and write; `plan` beside a CUDA graph of the same kernels.
"""
from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peer_process import Ended, Peer, serve

Array = np.ndarray[Any, Any]
ROUNDS, SECONDS = 15, 0.05      # a sample takes about so long
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}       # relative to the largest result
KERNELS = 100
PATIENCE = 90.0                 # seconds for an answer: to compile ResNet-50 takes long
OLDER = "sm_90"                 # has the card's mma.sync and no wgmma
WGMMA, MMA = 0.8, 0.6
NAME = 29                       # characters of the longest name


class Case(NamedTuple):
    """`function(functional, x, weights)` of tensors of either library. `how`: what PyTorch does with it: eager, flash, compiled, graph or
    copy. `goal` 0: reported only. `of`: svod's process, "older" without wgmma."""

    function: Callable[[Any, list[Any], list[Any]], Any]
    inputs: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]
    dtype: str
    goal: float
    how: str = "eager"
    of: str = "svod"


def cases(small: bool, wgmma: bool = True) -> dict[str, Case]:
    """All cases in their order; `small`: of sizes that a processor computes quickly; `wgmma`: the device has it."""
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

    def product(f: Any, x: list[Any], w: list[Any]) -> Any:
        return x[0] @ w[0]

    def norm_case(function: Callable[[Any, list[Any], list[Any]], Any], gains: int) -> Case:
        return Case(function, ((rows, columns),), ((columns,),) * gains, "float32", 1.0)

    def bound_by_memory(function: Callable[[Any, list[Any], list[Any]], Any], inputs: int = 1) -> Case:
        return Case(function, ((2 * rows, columns),) * inputs, (), "float32", 0.9, "copy")
    products = {"gemm_4096": Case(product, ((n, n),), ((n, n),), half, WGMMA if wgmma else MMA),
                "gemm_8192": Case(product, ((m, m),), ((m, m),), half, WGMMA if wgmma else MMA)}
    return {
        **products,
        "attention": Case(lambda f, x, w: f.scaled_dot_product_attention(*x, is_causal=True), (flash,) * 3, (), half, 0.5, "flash"),
        "conv": Case(lambda f, x, w: f.conv2d(x[0], w[0], padding=1), ((batch, channels, side, side),), ((channels, channels, 3, 3),),
                     half, 0.5),
        "softmax": norm_case(lambda f, x, w: f.softmax(x[0], dim=-1), 0),
        "layer_norm": norm_case(normed, 2),
        "rms_norm": norm_case(lambda f, x, w: f.rms_norm(x[0], (columns,), w[0]), 1),
        "plan": Case(chain, ((k, k),), ((k, k),), "float32", 1 / 1.2, "graph"),
        "stream": bound_by_memory(lambda f, x, w: f.relu(x[0])),
        "add": bound_by_memory(lambda f, x, w: x[0] + x[1], 2),
        "row_sum": bound_by_memory(lambda f, x, w: x[0].sum(-1)),
        "transpose": bound_by_memory(lambda f, x, w: x[0].transpose(0, 1).contiguous()),
        **({f"{name}_mma": case._replace(goal=MMA, of="older") for name, case in products.items()} if wgmma else {}),
        "gpt2_block": Case(lambda f, x, w: gpt2_block(f, x[0], w, heads), ((1, tokens, hidden),), gpt2_weights(hidden), half, 0.0,
                           "compiled"),
        "resnet50": Case(resnet50, ((batch, 3, size(224, 32), size(224, 32)),), tuple(resnet_weights()), half, 0.0, "compiled"),
    }


def shapes(small: bool, wgmma: bool = True) -> dict[str, Case]:
    """Kernels that are bound by memory, of rows of several lengths and of two types; without goals."""
    kernels: dict[str, Callable[[Any, list[Any], list[Any]], Any]] = {
        "softmax": lambda f, x, w: f.softmax(x[0], dim=-1), "layer_norm": lambda f, x, w: f.layer_norm(x[0], (x[0].shape[-1],)),
        "add": lambda f, x, w: x[0] + x[0], "row_sum": lambda f, x, w: x[0].sum(-1), "column_sum": lambda f, x, w: x[0].sum(0),
        "transpose": lambda f, x, w: x[0].transpose(0, 1).contiguous()}
    most = (37, 65) if small else (1 << 30, 1 << 30)
    return {f"{name}_{rows}x{columns}_{dtype}": Case(function, ((min(rows, most[0]), min(columns, most[1])),), (), dtype, 0.0)
            for rows, columns in ((8192, 4096), (32767, 1023), (262144, 64), (4194304, 3)) for dtype in ("float32", "bfloat16")
            for name, function in kernels.items()}


SUITES = {"goals": cases, "shapes": shapes}


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

    def __init__(self, device: str) -> None:
        self.device = device

    def about(self) -> dict[str, Any]:
        """The measured results."""
        from svod.compile.backend import backend_named
        target = backend_named(self.device).target()
        return {"device": self.device, "target": target.key, "wgmma": "wgmma" in target.features}

    def prepare(self, case: Case, seconds: float = 0.0) -> Array:
        """The result. `seconds`: to search before."""
        import svod.nn.functional as functional
        from svod import Tensor
        from svod.config import BeamConfig, PrepareConfig
        search = {"beam": BeamConfig(width=4, budget=seconds)} if seconds else {}
        tensors = [Tensor(a).cast(case.dtype).realize() for a in arrays_of(case)]
        count = len(case.inputs)
        result = case.function(functional, tensors[:count], tensors[count:])
        self.plan = result.prepare(PrepareConfig.from_env(device=self.device, **search), constants=tensors[count:])
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
        torch.backends.cudnn.benchmark = True
        self.device = "cpu" if device == "CPU" else device.lower()

    def about(self) -> dict[str, Any]:
        """The measured results."""
        torch = self.torch
        return {"torch": torch.__version__, "gpu": "" if self.device == "cpu" else torch.cuda.get_device_name(self.device)}

    def prepare(self, case: Case, seconds: float = 0.0) -> Array:
        """The result."""
        torch, count = self.torch, len(case.inputs)
        tensors = [torch.from_numpy(a).to(self.device, getattr(torch, case.dtype)) for a in arrays_of(case)]
        functional = importlib.import_module("torch.nn.functional")

        attention = importlib.import_module("torch.nn.attention")

        def plain() -> Any:
            return case.function(functional, tensors[:count], tensors[count:])

        def flash() -> Any:
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                return plain()
        result = plain()
        self.function: Callable[[], Any] = flash if case.how == "flash" else plain
        if case.how == "copy":      # it reads a half of the bytes and writes the other
            half = sum(t.numel() * t.element_size() for t in (*tensors, result)) // 2
            source, into = (torch.empty(half, dtype=torch.uint8, device=self.device) for _ in range(2))
            source.zero_()
            self.function = lambda: into.copy_(source)
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


def answer(library: Any, known: dict[str, Case], asked: Any) -> Any:
    """What the library is; the result of a case, given its name and the seconds to search; or the seconds of so many calls of it."""
    if asked is None:
        return library.about()
    if isinstance(asked, int):
        return library.sample(asked)
    got = library.prepare(known[asked[0]], asked[1]).astype(np.float64).ravel()
    return got[:: max(1, got.size // 997)].tolist()


# -- who asks ---------------------------------------------------------------------------------------------
class Record(NamedTuple):
    """What is known of a case: times of a call in µs, and PyTorch's over svod's with quartiles. `failed`: why it has none. `searched`: for
    so many seconds."""

    case: str
    beside: str
    goal: float
    svod: float = 0.0
    torch: float = 0.0
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    searched: float = 0.0
    failed: str = ""

    @property
    def met(self) -> bool:
        """Whether it was measured and its goal, if there is one, is met."""
        return not self.failed and self.ratio >= self.goal

    def line(self) -> str:
        """A row of the table."""
        goal = f"goal {self.goal:.2f} {'met' if self.met else 'MISSED'}" if self.goal else "no goal" if self.met else "MISSED"
        if self.failed:
            return f"{self.case:<{NAME}} {goal:<16} {self.failed}"
        searched = f", searched {self.searched:.0f} s" if self.searched else ""
        return (f"{self.case:<{NAME}} {goal:<16} {self.ratio:>6.2f}×  ({self.low:.2f}–{self.high:.2f})  svod {self.svod:>9.1f} µs  "
                f"PyTorch {self.torch:>9.1f} µs  {self.beside}{searched}")

    def data(self) -> dict[str, Any]:
        """For the file."""
        return {**self._asdict(), "met": self.met}


class Processes:
    """The processes of a run by name: svod, older (svod for an older architecture) and torch. Each begins when it is first asked for, and
    again after it has ended."""

    def __init__(self, args: argparse.Namespace) -> None:
        here, shared = str(Path(__file__).resolve()), ["--small"] * args.small + ["--suite", args.suite]
        first = args.device if args.device == "CPU" or ":" in args.device else f"{args.device}:0"
        older = args.device if args.device == "CPU" else f"{first}:{OLDER}"
        serve_svod, serve_torch = ([python, here, "--serve", name] for python, name in ((sys.executable, "svod"), (args.torch, "torch")))
        self.commands: dict[str, tuple[list[str], dict[str, str]]] = {
            "svod": ([*serve_svod, "--device", args.device, *shared], {}), "older": ([*serve_svod, "--device", older, *shared], {}),
            "torch": ([*serve_torch, "--device", args.device, *shared], {"PYTHONPATH": ""})}
        self.running: dict[str, Peer] = {}
        self.deadline = time.monotonic() + args.seconds if args.seconds else None

    def left(self) -> float:
        """The seconds that are left of the run."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def named(self, name: str) -> Peer:
        """A process."""
        if name not in self.running:
            self.running[name] = Peer(*self.commands[name])
        return self.running[name]

    def ask(self, peer: Peer, question: Any) -> Any:
        """A process's answer, within the time that is left."""
        return peer.ask(question, min(PATIENCE, max(0.0, self.left())))

    def end(self) -> None:
        """End all."""
        for peer in self.running.values():
            peer.end()
        self.running.clear()


def calls_of_a_sample(processes: Processes, peer: Peer) -> int:
    """The number of calls that take about SECONDS."""
    times = 1
    while (seconds := processes.ask(peer, times)) < SECONDS and times < 1 << 14:
        times = max(2 * times, int(times * SECONDS / max(seconds, 1e-6) / 2))
    return times


def compare(processes: Processes, name: str, case: Case, search: float = 0.0) -> Record:
    """The record of a case. A process that ends, or is too slow, begins anew with the next one."""
    record = Record(name, case.how, case.goal, searched=search)
    if processes.left() <= 0:
        return record._replace(failed="not measured: no time was left")
    try:
        both = [processes.named(case.of), processes.named("torch")]
        for p in both:
            p.send([name, search])
        ours, theirs = (np.array(p.receive(min(PATIENCE + search, max(0.0, processes.left())))) for p in both)
        apart = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        if not apart <= TOLERANCE[case.dtype]:
            return record._replace(failed=f"the results differ by {apart:.2g} of the largest")
        turns = [(p, calls_of_a_sample(processes, p)) for p in both]
        rounds = [[processes.ask(p, n) / n for p, n in (turns if i % 2 else turns[::-1])][:: 1 if i % 2 else -1] for i in range(ROUNDS)]
    except Ended as e:
        processes.end()
        return record._replace(failed=str(e))
    low, ratio, high = statistics.quantiles([t / s for s, t in rounds], n=4)
    svod, torch = (1e6 * statistics.median(column) for column in zip(*rounds, strict=True))
    return record._replace(svod=svod, torch=torch, ratio=ratio, low=low, high=high)


def measure(processes: Processes, known: dict[str, Case], tune: float, told: Callable[[dict[str, Record]], None]) -> dict[str, Record]:
    """The records of cases: all as they are, then those that missed their goals once more, searched. `told` has the records so far."""
    records: dict[str, Record] = {}
    for search in (0.0, tune) if tune else (0.0,):
        for name, case in known.items():
            before = records.get(name)
            if before is not None and (before.met or before.failed or processes.left() < search):
                continue
            record = compare(processes, name, case, search)
            print(record.line(), flush=True)
            if before is None or record.ratio > before.ratio:       # a search that fails makes nothing worse
                records[name] = record
            told(records)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", help="the Python that has PyTorch for CUDA")
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(cases(True))} (all)")
    parser.add_argument("--suite", choices=sorted(SUITES), default="goals", help="what is timed (goals)")
    parser.add_argument("--device", default="CUDA", help="CUDA, CUDA:1, … or CPU (CUDA)")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS",
                        help="search each case that missed its goal for so long (0: none)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="SECONDS", help="for the whole run (0: as long as it takes)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where results go")
    parser.add_argument("--serve", choices=("svod", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(lambda: partial(answer, (Svod if args.serve == "svod" else Torch)(args.device), SUITES[args.suite](args.small)))
        return 0
    if not args.torch:
        parser.error("--torch PYTHON is needed")
    processes = Processes(args)
    try:
        about = {k: v for name in ("svod", "torch") for k, v in processes.ask(processes.named(name), None).items()}
        print(", ".join(f"{k} {v}" for k, v in about.items()))
        known = SUITES[args.suite](args.small, about["wgmma"] or args.device == "CPU")
        asked = {name: known[name] for name in args.only.split(",")} if args.only else known

        def told(records: dict[str, Record]) -> None:
            if args.json:
                args.json.write_text(json.dumps({**about, "records": [r.data() for r in records.values()]}, indent=1))
        records = measure(processes, asked, args.tune, told)
    finally:
        processes.end()
    print("\nall goals:", *(r.line() for r in records.values() if r.goal or not r.met), sep="\n")
    return 0 if all(r.met for r in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
