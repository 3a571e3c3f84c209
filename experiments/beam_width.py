"""Is a wider beam ever worse? Each kernel searched with both widths, from nothing, the winners timed against each other, interleaved.

    python experiments/beam_width.py                                 # beam 8 against beam 4, the core suite, default budgets
    python experiments/beam_width.py --seeds 3 --kernels 'gemm_*'    # three searches each, of seeds 0, 1, 2
    python experiments/beam_width.py --widths 1,2,4,8 --suite random --random-seed 7

A ratio is the narrow beam's time over the wide one's, with the least and the most that one of three processes measures: above 1 the wide
beam found something faster. It is worse beyond the noise of timing when in each process the 95 % interval does not reach 1, or the median
is below 0.97. The first width is searched twice: by how much two searches that differ in their measurements alone differ is the noise in
which the others are to be seen. So the last lines say which wide searches were slower than both narrow ones, in each process and by
intervals that do not meet, and how many were faster than both. What is shared by the studies is in `paired.py`.
"""
from __future__ import annotations

import argparse

from paired import Line, arguments, study


def main() -> None:
    parser = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--widths", default="4,8", help="joined by commas; all are compared with the first")
    args = parser.parse_args()
    first, *others = map(int, args.widths.split(","))
    lines = study(args, {f"beam {first}": {"width": first}, f"beam {first} again": {"width": first},
                         **{f"beam {width}": {"width": width} for width in others}})
    for i, width in enumerate(others, start=2):
        slower = [f"{line.kernel} (seed {line.seed})" for line in lines if outside(line, i) == "slower"]
        faster = sum(outside(line, i) == "faster" for line in lines)
        print(f"beam {width}: of {len(lines)} faster than both searches with beam {first} in {faster}, slower than both in {len(slower)}"
              f"{': ' + ', '.join(slower) if slower else ''}")


def outside(line: Line, i: int) -> str:
    """Whether setting i's winner is slower, or faster, than both winners of the first width; else between."""
    timed = list(zip(line.ratios[1], line.ratios[i], strict=True))
    if all(wide.high < min(1.0, again.low) for again, wide in timed):
        return "slower"
    return "faster" if all(wide.low > max(1.0, again.high) for again, wide in timed) else "between"


if __name__ == "__main__":
    main()
