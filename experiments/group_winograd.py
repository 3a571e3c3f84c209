"""Predicted cycles of the 3×3 convolutions of a ResNet on a GPU of NVIDIA's: directly, and by WINOGRAD, phase by phase. No GPU is needed.

    python experiments/group_winograd.py
    python experiments/group_winograd.py --device CUDA:sm_80 --batch 1 16

The last two columns: multiplications by the rate of the device's arithmetic alone, of the direct convolution and of the products.
"""
from __future__ import annotations

import argparse
from math import ceil

import numpy as np

import svod
from svod import Tensor
from svod.config import PrepareConfig
from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.kernel.apply import algorithm_of
from svod.core.kernel.scheduler import Scheduler

LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7))     # channels, and the side of the image


def base_of(batch: int, channels: int, side: int, config: PrepareConfig) -> Scheduler:
    """The state without opts of a 3×3 convolution whose weights are constants."""
    x, w = (Tensor(np.zeros(shape, np.float32)) for shape in ((batch, channels, side, side), (channels, channels, 3, 3)))
    return svod.kernel(x.conv2d(w, padding=1), config=config, constants=[w]).untouched().state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA:sm_90")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    config = PrepareConfig(device=args.device, db=":none:")
    print("batch  channels  side    direct  WINOGRAD  phases: data, products, results   gain  chosen    by rate")
    for batch in args.batch:
        for channels, side in LAYERS:
            base = base_of(batch, channels, side, config)
            found = group_sketches(base)
            direct = min(group_cost(s).cycles for s in found if not algorithm_of(s.applied_opts))
            best = min((s for s in found if algorithm_of(s.applied_opts)), key=lambda s: group_cost(s).cycles)
            cost, device = group_cost(best), device_of(base.target)
            phases = ", ".join(f"{p.cycles:.0f}" for p in cost.parts)
            chosen = "WINOGRAD" if algorithm_of(group_heuristic(base).applied_opts) else "direct"
            rate, tiles = channels * channels * batch / device.units / device.arithmetic, ceil(side / best.applied_opts[0].arg)
            print(f"{batch:5}  {channels:8}  {side:4}  {direct:8.0f}  {cost.cycles:8.0f}  {phases:32} {direct / cost.cycles:5.2f}  "
                  f"{chosen:8}  {rate * 9 * side * side:8.0f} {rate * (best.applied_opts[0].arg + 2) ** 2 * tiles * tiles:8.0f}")


if __name__ == "__main__":
    main()
