"""The cost of choosing chains for devices with groups of threads: processor seconds of the heuristic, sketches made, and those priced.

    SVOD_DEVICE=CUDA:sm_90 svod-tune experiments/models/encoder_layer.py --compile-only --capture-to encoder -- --no-check
    SVOD_DEVICE=CUDA:sm_90 svod-tune experiments/models/resnet18.py --compile-only --capture-to resnet18 -- --no-check
    python experiments/group_heuristics.py encoder resnet18                       # a line per target: sm_90, sm_75
    python experiments/group_heuristics.py encoder --only attention --arch sm_90

No device is needed. Each kernel is analysed anew, as in a new process.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from svod.compile.cuda.targets import ARCHITECTURES, target_of
from svod.core.cost.cost import Cost
from svod.core.cost.groups.group_sketch import best_sketch
from svod.core.cost.groups.prices import GroupPrices
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.tune.capture import read_capture


class Counting(GroupPrices):
    """Counts the states that get a bound, and those that are priced."""

    def __init__(self) -> None:
        super().__init__()
        self.bounded, self.priced = set[bytes](), set[bytes]()

    def least(self, state: Scheduler) -> float:
        self.bounded.add(state.digest)
        return super().least(state)

    def cost(self, state: Scheduler) -> Cost:
        self.priced.add(state.digest)
        return super().cost(state)


def kernels_of(capture: str, only: str) -> Iterator[Kernel]:
    """The distinct kernels of a capture whose names have `only`, analysed anew."""
    seen: set[str] = set()
    for plan in read_capture(capture).plans:
        for call in plan.unbound.calls:
            kernel = plan.unbound.kernels.get(call.kernel)
            if kernel is not None and kernel.library_kernel is None and call.kernel not in seen and only in (call.name or ""):
                seen.add(call.kernel)
                yield Kernel(kernel.ast)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs="+")
    parser.add_argument("--only", default="", help="a part of the names of kernels")
    parser.add_argument("--arch", nargs="+", default=["sm_90", "sm_75"], choices=ARCHITECTURES)
    args = parser.parse_args()
    for capture in args.captures:
        for arch in args.arch:
            target = target_of(ARCHITECTURES[arch], ARCHITECTURES[arch].card, f"CUDA:{arch}")
            kernels, seconds, bounded, priced = list(kernels_of(capture, args.only)), 0.0, 0, 0
            for kernel in kernels:
                prices, start = Counting(), time.process_time()
                best_sketch(Scheduler(kernel, target), prices)
                seconds += time.process_time() - start
                bounded, priced = bounded + len(prices.bounded), priced + len(prices.priced)
            print(f"{capture:20} {arch}  {len(kernels):3} kernels  {seconds:6.2f} s  {bounded:6} sketches, {priced} priced", flush=True)


if __name__ == "__main__":
    main()
