"""One layer of a transformer's encoder out of svod.nn, of the size of BERT base, in a type of 16 bits: 1×128×768.

    SVOD_DEVICE=CUDA:sm_90 svod-tune experiments/models/encoder_layer.py --compile-only
    python experiments/models/encoder_layer.py --dtype float16              against the same layer in float32
"""
from __future__ import annotations

from run_model import largest_error

# isort: split
import argparse
import sys

import numpy as np

import svod
from svod import Tensor, nn

TOLERANCE = {"bfloat16": 5e-2, "float16": 1e-2}      # relative to the largest output: two norms of sums over 3072 products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with the layer in float32 (default)")
    args = parser.parse_args()
    Tensor.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True).eval()
    x = Tensor(np.random.default_rng(1).standard_normal((1, 128, 768), dtype=np.float32))
    wanted = layer(x).numpy() if args.check else None
    layer = layer.to(args.dtype)
    got = svod.jit(layer)(x.cast(args.dtype).realize()).cast("float32").numpy()
    if wanted is not None:
        error = largest_error(got, wanted)
        print(f"largest difference to float32: {error:.1e} of the largest output")
        if not error <= TOLERANCE[args.dtype]:
            sys.exit(f"the output is wrong: {error:.1e} is above {TOLERANCE[args.dtype]:g}")


if __name__ == "__main__":
    main()
