"""Strategies on hardware: kernels searched with each strategy and with the learned cost model, for the same time, the winners timed against
each other, interleaved, in several processes (paired.py).

    python experiments/strategies/live.py --kernels 'gemm_512,softmax*' --seconds 20 --seeds 3
    python experiments/strategies/live.py --kernels gemm_256 --only 'random,learned'
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paired import arguments, study

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "beam": {},
    "beam again": {},       # difference of two equal searches
    "learned": {"cost_model": "learned"},
    "evolve": {"strategy": "evolve"},
    "optuna": {"strategy": "optuna"},
    "random": {"strategy": "random"},
}


def main() -> None:
    parser = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--only", metavar="NAMES", help="variants beside beam, joined by commas")
    args = parser.parse_args()
    names = list(VARIANTS) if args.only is None else ["beam", *(n.strip() for n in args.only.split(","))]
    unknown = [n for n in names if n not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {', '.join(map(repr, unknown))}; there are {', '.join(VARIANTS)}")
    study(args, {n: {"width": args.width, "patience": 1000, **VARIANTS[n]} for n in names})


if __name__ == "__main__":
    main()
