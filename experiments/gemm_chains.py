"""Chains of one bfloat16 product, or convolution, on a GPU: what the cost model predicts, and what each takes.

    python experiments/gemm_chains.py --device CUDA --size 4096
    python experiments/gemm_chains.py --device CUDA:0:sm_90 --size 8192 --first 20       the same by mma.sync, more of the sketches
    python experiments/gemm_chains.py --convolution 32,256,256,28,3,1                    images, inputs, outputs, size, taps, stride

The heuristic's chain comes first, then chains that differ from it in one choice (buffers, positions of a block, the order of groups), then
the sketches that are predicted fastest. Each is compiled and timed in a process of its own, as a search times it.
"""
from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

import numpy as np

BUFFERS, BLOCKS, ROWS = (2, 3, 4, 6), (2, 4, 8), (4, 8, 16)


def changed(chain: str) -> Iterator[tuple[str, str]]:
    """Chains that differ from one of a product with operands in shared memory in one choice, with what it is."""
    for buffers in BUFFERS:
        yield f"{buffers} buffers", re.sub(r"PIPELINE\(r0, \d+\)", f"PIPELINE(r0, {buffers})", chain)
    for block in BLOCKS:
        yield f"blocks of {block}", re.sub(r"TILE\(r0, \d+\)", f"TILE(r0, {block})", chain)
    for rows in ROWS:
        yield f"{rows} rows of groups", f"{chain} TILE(o0, {rows})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--convolution", metavar="N,C,O,SIZE,TAPS,STRIDE", help="a convolution, its image and weights with channels last")
    parser.add_argument("--first", type=int, default=6, help="how many of the sketches (default: 6)")
    args = parser.parse_args()
    os.environ["SVOD_DEVICE"] = args.device
    import svod
    from svod import Tensor
    from svod.errors import SvodError
    rng, n = np.random.default_rng(0), args.size

    def drawn(*shape: int) -> Tensor:
        return Tensor(rng.standard_normal(shape, dtype=np.float32)).cast("bfloat16").realize()
    if args.convolution:
        images, c, o, size, taps, stride = map(int, args.convolution.split(","))
        image, weight = drawn(images, size, size, c).permute(0, 3, 1, 2), drawn(o, taps, taps, c).permute(0, 3, 1, 2)
        y = image.conv2d(weight, stride=stride, padding=taps // 2).permute(0, 2, 3, 1).contiguous()
        kernel, products = svod.kernel(y), float(y.numel() * c * taps * taps)
    else:
        kernel, products = svod.kernel(drawn(n, n) @ drawn(n, n)), float(n ** 3)
    best = kernel.heuristic()
    rows = [("heuristic", best), *[("sketch", k) for k in kernel.sketches()[:args.first]]]
    for what, chain in changed(best.chain):
        try:
            rows.append((what, kernel.untouched().apply(chain)))
        except SvodError as e:
            print(f"{what:20} {e}")
    for what, state in rows:
        try:
            seconds = float(state.time())
        except SvodError as e:
            print(f"{what:20} {e}")
            continue
        rate = 2e-12 * products / seconds
        print(f"{what:20} {1e6 * seconds:9.1f} µs {rate:6.0f} TFLOP/s, predicted {state.cost().cycles:10.0f}", state.chain, flush=True)


if __name__ == "__main__":
    main()
