"""svod beside tinygrad's WEBGPU backend on the same adapter: six kernels and ResNet-18, each library in a process of its own, in turns.

    pip install '.[webgpu]'                 here; there, in an environment of its own: pip install tinygrad dawn-python numpy
    python experiments/webgpu_peers.py --tinygrad /path/to/bin/python [--dawn libwebgpu_dawn.so] [--only gemm,softmax]
    python experiments/webgpu_peers.py --tinygrad … --tune 60                   svod searches each kernel with beam 4 for 60 s before
    python experiments/webgpu_peers.py --tinygrad … --tune 60 --beam 2          tinygrad searches, too, with its beam of 2

A round times one call of each, arguments on the device and the result waited for. What is printed is the median over the rounds, and
that of the ratios round by round with its quartiles. Results are compared before anything is timed. Winners are kept, by svod in
SVOD_TUNE_DB, by tinygrad in its own cache, so a tuned run may be ended and begun again.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peer_process import Peer, peers, serve

Array = np.ndarray[Any, Any]
TOLERANCE = 1e-3            # relative to the largest result: float32, sums in other orders
ROUNDS = 15
RESNET = "resnet18"
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemm": ((256, 256), (256, 256)), "conv": ((1, 64, 28, 28), (64, 64, 3, 3)), "softmax": ((512, 1024),), "layer norm": ((512, 1024),),
    "reduction": ((1024, 2048),), "elementwise": ((1024, 1024), (1024, 1024)), RESNET: ((1, 3, 224, 224),),
}


def operation(name: str, *x: Any) -> Any:
    """A kernel, written with what the tensors of both libraries have."""
    if name == "gemm":
        return x[0] @ x[1]
    if name == "conv":
        return x[0].conv2d(x[1], padding=1).relu()
    if name == "softmax":
        return x[0].softmax(-1)
    if name == "layer norm":
        centred = x[0] - x[0].mean(-1, keepdim=True)
        return centred * ((centred * centred).mean(-1, keepdim=True) + 1e-5).rsqrt()
    if name == "reduction":
        return x[0].sum(1)
    return (x[0] * 1.5 + x[1]).relu()


def resnet18(tensor: Callable[[Array], Any]) -> Callable[[Any], Any]:
    """ResNet-18 (He et al., 2015) with weights from a seed, the norms folded into a gain and an offset of each channel."""
    rng = np.random.default_rng(0)

    def convolution(inputs: int, outputs: int, size: int, stride: int) -> Callable[[Any], Any]:
        weight = tensor((rng.standard_normal((outputs, inputs, size, size)) * (2 / (inputs * size * size)) ** 0.5).astype(np.float32))
        gain, offset = (tensor(rng.uniform(0.5, 1.0, (1, outputs, 1, 1)).astype(np.float32)) for _ in range(2))
        return lambda x: x.conv2d(weight, stride=stride, padding=size // 2) * gain + offset
    first = convolution(3, 64, 7, 2)
    blocks, inputs = [], 64
    for stage in range(4):
        outputs = 64 << stage
        for i in range(2):
            stride = 2 if stage and not i else 1
            blocks.append((convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1),
                           convolution(inputs, outputs, 1, stride) if stride > 1 else None))
            inputs = outputs
    last = tensor((rng.standard_normal((512, 1000)) / 512 ** 0.5).astype(np.float32))

    def model(x: Any) -> Any:
        y = first(x).relu().max_pool2d((3, 3), stride=2, padding=1)
        for one, two, shortcut in blocks:
            y = (two(one(y).relu()) + (y if shortcut is None else shortcut(y))).relu()
        return y.mean((2, 3)) @ last
    return model


# -- what answers in each process ----------------------------------------------------------------------
class Svod:
    """svod: a plan, whose inputs lie on the device."""

    def __init__(self, seconds: float) -> None:
        from svod.config import BeamConfig, PrepareConfig
        search = BeamConfig(width=4, budget=seconds) if seconds else None
        self.config = PrepareConfig.from_env(device="WEBGPU", **({"beam": search} if search else {}))

    def prepare(self, name: str, arrays: list[Array]) -> Array:
        from svod import Tensor
        from svod.tune.at_prepare import begin_budget
        begin_budget()      # each kernel has its own seconds
        given, weights = [Tensor(a) for a in arrays], list[Any]()

        def weight(array: Array) -> Any:
            weights.append(Tensor(array))
            return weights[-1]
        result = resnet18(weight)(*given) if name == RESNET else operation(name, *given)
        self.plan = result.prepare(self.config, constants=weights)
        self.plan.execute()
        return np.array(self.plan.outputs[0]).reshape(result.shape)

    def call(self) -> None:
        self.plan.repeat(1)


class Tinygrad:
    """tinygrad: a function under TinyJit, waited for."""

    def prepare(self, name: str, arrays: list[Array]) -> Array:
        from tinygrad import Device, Tensor, TinyJit
        self.wait = Device[Device.DEFAULT].synchronize
        self.given = [Tensor(a).realize() for a in arrays]
        model = resnet18(lambda a: Tensor(a).realize()) if name == RESNET else lambda *x: operation(name, *x)
        self.function = TinyJit(lambda *x: model(*x).realize())
        for _ in range(3):      # eager, captured, replayed
            result = self.function(*self.given)
        return np.asarray(result.numpy())

    def call(self) -> None:
        self.function(*self.given)
        self.wait()


def answer(library: Any, name: str | None) -> Any:
    """The result of a kernel; None: the seconds of a call of the one that was asked for last."""
    if name is None:
        started = time.perf_counter()
        library.call()
        return time.perf_counter() - started
    rng = np.random.default_rng(1)
    got = library.prepare(name, [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES[name]])
    return [got.astype(np.float64).ravel()[:: max(1, got.size // 997)].tolist()]


# -- who asks ---------------------------------------------------------------------------------------------
def commands(args: argparse.Namespace) -> list[tuple[list[str], dict[str, str]]]:
    """svod's process and tinygrad's."""
    here = str(Path(__file__).resolve())
    dawn = {"WEBGPU_PATH": args.dawn} if args.dawn else {}
    return [([sys.executable, here, "--serve", "svod", "--tune", str(args.tune)], {}),
            ([args.tinygrad, here, "--serve", "tinygrad"], {"DEV": "WEBGPU", "BEAM": str(args.beam), "PYTHONPATH": "", **dawn})]


def compare(name: str, both: list[Peer]) -> str:
    """A line of the table."""
    ours, theirs = (np.array(p.ask(name)[0]) for p in both)
    apart = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if apart > TOLERANCE:
        return f"{name:<12} the results differ by {apart:.2g} of the largest"
    rounds = [[p.ask(None) for p in (both if i % 2 else both[::-1])][:: 1 if i % 2 else -1] for i in range(ROUNDS)]
    low, ratio, high = statistics.quantiles([t / s for s, t in rounds], n=4)
    seconds = [statistics.median(column) for column in zip(*rounds, strict=True)]
    return f"{name:<12} {1e3 * seconds[0]:>9.2f} ms {1e3 * seconds[1]:>9.2f} ms {ratio:>8.2f}×  ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tinygrad", metavar="PYTHON", help="the Python that has tinygrad and the library Dawn")
    parser.add_argument("--dawn", metavar="FILE", help="the library, where tinygrad does not find it by itself")
    parser.add_argument("--only", default=",".join(SHAPES), metavar="NAMES", help=f"of {', '.join(SHAPES)} (all)")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="svod searches for so long before, with beam 4 (0: not)")
    parser.add_argument("--beam", type=int, default=0, metavar="N", help="tinygrad's beam (0: no search)")
    parser.add_argument("--serve", choices=("svod", "tinygrad"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(lambda: partial(answer, Svod(args.tune) if args.serve == "svod" else Tinygrad()))
        return
    if not args.tinygrad:
        parser.error("--tinygrad PYTHON is needed")
    print(f"{'':<12} {'svod':>12} {'tinygrad':>12} {'tinygrad / svod':>16}")
    with peers(*commands(args)) as both:
        for name in args.only.split(","):
            print(compare(name, both), flush=True)


if __name__ == "__main__":
    main()
