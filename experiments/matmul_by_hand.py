"""A product of matrices by hand: from three plain loops to the machine's ceiling, opt by opt, each with its nest and its GFLOP/s.

    python experiments/matmul_by_hand.py [--size N] [--weights]

Each step says what it is for. The amounts come from the target: its vectors, its registers, its cores. `--weights`: the second operand does
not change, and is arranged once.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

import svod
from svod import Tensor
from svod.compile.backend import backend_named
from svod.core.machine.target import Target
from svod.errors import KernelOptError
from svod.tune.hand_kernel import HandKernel

Step = tuple[str, tuple[object, ...]]


def steps(target: Target) -> Iterator[Step]:
    """A step in words, and the opt that does it. `o0` are rows of the product, `o1` its columns, `r0` what is summed."""
    lanes = max(1, target.vector_bytes // 4)
    registers = 6 if target.vector_registers <= 16 else 12
    yield "a vector of columns: neighbours in memory are computed side by side", ("UPCAST", "o1", lanes)
    yield "two vectors of columns: each element of the first operand is used for both", ("UPCAST", "o1", 2)
    yield f"{registers} rows: each vector of the second operand is used {registers} times, and the sums fill the registers", \
        ("UPCAST", "o0", registers)
    yield "columns outermost: a strip of the second operand stays in the first cache for all rows", ("ORDER", "out", ("o1", "o0"))
    yield "the strip is copied to lie in the order it is read: whole cache lines, one page after the other", ("STAGE", "s1", "o1")
    yield "two elements of the sum per turn: fewer branches", ("UNROLL", "r0", 2)
    yield "the strips are shared among the cores", ("THREAD", "o1", target.threads)


def walk(k: HandKernel) -> Iterator[tuple[str, HandKernel]]:
    """The kernel after each step; a step that the target refuses is left out and said."""
    yield "untouched: each element of the product is a sum of its own", k
    for why, opt in steps(k.state.target):
        try:
            k = k.apply(*opt)  # type: ignore[arg-type]
        except KernelOptError as error:
            yield f"left out, {opt}: {error}", k
            continue
        yield f"{k.opts[-1]}: {why}", k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--weights", action="store_true")
    arguments = parser.parse_args()
    n = arguments.size
    rng = np.random.default_rng(0)
    a, b = (Tensor(rng.standard_normal((n, n), dtype=np.float32)) for _ in range(2))
    first = svod.kernel(a @ b, constants=[b] if arguments.weights else [])
    last: HandKernel | None = None
    for number, (why, k) in enumerate(walk(first)):
        print(f"\n{number}. {why}")
        if last is not None and k.chain == last.chain:
            continue
        print(k.nest())
        check = k.check()
        print(f"   {k.time()}; {'right' if check else check}")
        last = k
    assert last is not None
    print(f"\nby hand       {last.time()}   {last.chain}")
    heuristic = last.heuristic()
    print(f"the heuristic {heuristic.time()}   {heuristic.chain}")
    print(f"predicted     {last.cost().cycles:.4g} cycles by hand, {heuristic.cost().cycles:.4g} the heuristic's "
          f"({backend_named(first.state.target.device).name})")


if __name__ == "__main__":
    main()
