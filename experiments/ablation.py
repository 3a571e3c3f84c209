"""The worth of parts of the search: the same kernels searched with parts turned off, with the same budget, the winners timed
against each other, interleaved.

    python experiments/ablation.py                                       # the core suite, all variants
    python experiments/ablation.py --kernels 'gemm_512,softmax*' --seconds 20 --candidates 300
    python experiments/ablation.py --only 'without sketches,reference grid'

    full                 the search as it is
    full again           the same once more: by how much two searches differ that are alike
    without sketches     from the untouched kernel; the heuristic's chain, which is a sketch, is no start either
    without mutations    chains only grow, by the default grid
    without both
    reference grid       without both, and single opts with the amounts of the reference systems
    reference search     that, and their order and stop rule (BEAM_STRICT=reference)

A ratio is the full search's time over the variant's, with the least and the most that one of three processes measures: below 1 the variant
found something slower. What is shared by the studies is in `paired.py`.
"""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from paired import arguments, study

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full again": {},
    "without sketches": {"sketches": False},
    "without mutations": {"mutations": False},
    "without both": {"sketches": False, "mutations": False},
    "reference grid": {"sketches": False, "mutations": False, "actions": "reference"},
    "reference search": {"sketches": False, "strict": "reference"},
}


def main() -> None:
    parser = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--only", metavar="NAMES", help="variants beside full, joined by commas")
    args = parser.parse_args()
    names = list(VARIANTS) if args.only is None else ["full", *(n.strip() for n in args.only.split(","))]
    unknown = [n for n in names if n not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {', '.join(map(repr, unknown))}; there are {', '.join(VARIANTS)}")
    study(args, {n: {"width": args.width, **VARIANTS[n]} for n in names})


if __name__ == "__main__":
    main()
