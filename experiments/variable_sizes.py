"""Records how fast each chain of a kernel with Variables is at many sizes, and what a choice at a few sizes costs at the others.

    python experiments/variable_sizes.py                            records, and prints what the choice costs
    python experiments/variable_sizes.py --record times.json        the same, and keeps the record
    python experiments/variable_sizes.py --read tests/experiments/variable_sizes.json     prints what the choice costs by a record

The kernels are those of a BERT layer with a batch of 1 to 8 and a length of 1 to 200: a projection, attention and a layer norm. The chains
are the heuristic's and the sketches that are predicted fastest. All run in turns; a time is the least of the rounds. The choice is that of
a search: the least geometric mean of the ratios to the heuristic at the sizes that a search times, of the chains that at none of them take
more than WORST_RATIO times as long.
"""
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from svod import PrepareConfig, Tensor, Variable, kernel
from svod.compile.plan.plan_parts import VariableSpec
from svod.core.ir.variable import layout_shape
from svod.tune.db.winners import WORST_RATIO
from svod.tune.measure.sizes import geometric_mean, sizes_of_variables

MOST_BATCH, MOST_LENGTH, WIDTH, HEADS = 8, 200, 256, 4
OTHERS = ((1, 24), (1, 101), (1, 176), (2, 45), (2, 140), (3, 90), (4, 24), (4, 64), (5, 87), (6, 160), (7, 62), (8, 35), (8, 139))
LEAST_SECONDS = 2e-4        # a round runs a plan repeatedly for at least so long


def of_sizes(*shape: int, axis: int = 1) -> Tensor:
    """Random numbers whose first axis and axis `axis` have the sizes of the variables, in the layout of the largest sizes, in which a
    plan keeps its values."""
    b, n = Variable("batch", 1, MOST_BATCH).bind(2), Variable("length", 1, MOST_LENGTH).bind(3)
    whole = [n if i == axis else b if i == 0 else size for i, size in enumerate(shape)]
    made = drawn(*layout_shape(whole))
    return made[:b, :n] if axis == 1 else made[:b, :, :n]


def drawn(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def projection() -> tuple[Tensor, list[Tensor]]:
    weight, bias = drawn(WIDTH, 3 * WIDTH).realize(), drawn(3 * WIDTH).realize()
    return of_sizes(0, 0, WIDTH) @ weight + bias, [weight, bias]


def attention() -> tuple[Tensor, list[Tensor]]:
    q, k, v = (of_sizes(0, HEADS, 0, WIDTH // HEADS, axis=2) for _ in range(3))
    return q.scaled_dot_product_attention(k, v), []


def layer_norm() -> tuple[Tensor, list[Tensor]]:
    weight, bias = drawn(WIDTH).realize(), drawn(WIDTH).realize()
    return (of_sizes(0, 0, WIDTH) + of_sizes(0, 0, WIDTH)).layer_norm((WIDTH,), weight, bias), [weight, bias]


KERNELS = {"projection": projection, "attention": attention, "layer norm": layer_norm}


def recorded(make: Callable[[], tuple[Tensor, list[Tensor]]], chains: int, rounds: int) -> dict[str, Any]:
    """The seconds of a kernel's first `chains` chains at all sizes, as the least of `rounds` rounds."""
    tensor, constants = make()
    mine = kernel(tensor, constants=constants)
    texts = list(dict.fromkeys(k.chain for k in (mine.heuristic(), *mine.sketches())))[:chains]
    plans = []
    for chain in texts:
        tensor, constants = make()
        plans.append(tensor.prepare(PrepareConfig(opts={mine.key: chain}, db=":none:", object_cache=":none:"), constants=constants))
    tuned = sizes_of_variables([VariableSpec("batch", 1, MOST_BATCH), VariableSpec("length", 1, MOST_LENGTH)])
    sizes = [*tuned, *OTHERS]
    least = np.full((len(plans), len(sizes)), np.inf)
    for _ in range(rounds):
        for s, (batch, length) in enumerate(sizes):
            for i, plan in enumerate(plans):
                plan.set_variables({"batch": batch, "length": length})
                plan.execute()
                count = 1 if not np.isfinite(least[i, s]) else max(1, round(LEAST_SECONDS / least[i, s]))
                start = time.perf_counter()
                for _ in range(count):
                    plan.execute()
                least[i, s] = min(least[i, s], (time.perf_counter() - start) / count)
    return {"tuned": tuned, "sizes": sizes, "seconds": {chain: [float(f"{t:.4g}") for t in row] for chain, row in
                                                        zip(texts, least.tolist(), strict=True)}}


def choice(seconds: Mapping[str, Sequence[float]], places: Sequence[int]) -> str:
    """The chain that a search chooses by the times at some sizes; `places`: the numbers of these. The first chain is the heuristic's."""
    own = next(iter(seconds.values()))
    ratios = {chain: [row[i] / own[i] for i in places] for chain, row in seconds.items()}
    return min((c for c, r in ratios.items() if max(r) <= WORST_RATIO), key=lambda c: geometric_mean(ratios[c]))


def losses(record: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """For each size at which nothing was tuned: the time of the chosen chain over that of the size's own best."""
    sizes, seconds = [tuple(s) for s in record["sizes"]], record["seconds"]
    tuned = [sizes.index(tuple(s)) for s in record["tuned"]]
    chosen = seconds[choice(seconds, tuned)]
    return {size: chosen[i] / min(row[i] for row in seconds.values()) for i, size in enumerate(sizes) if i not in tuned}


def text_of(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The records as JSON, a chain a line and its seconds in the next."""
    parts = []
    for name, record in records.items():
        rows = ",\n".join(f"   {json.dumps(chain)}:\n    {json.dumps(seconds)}" for chain, seconds in record["seconds"].items())
        parts.append(f' {json.dumps(name)}: {{\n  "tuned": {json.dumps(record["tuned"])},\n  "sizes": {json.dumps(record["sizes"])},\n'
                     f'  "seconds": {{\n{rows}\n  }}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--read", type=Path)
    options = parser.parse_args()
    if options.read is not None:
        records = json.loads(options.read.read_text())
    else:
        records = {name: recorded(make, options.chains, options.rounds) for name, make in KERNELS.items()}
    if options.record is not None:
        options.record.write_text(text_of(records))
    for name, record in records.items():
        chosen = choice(record["seconds"], range(len(record["tuned"])))
        print(f"{name}, tuned at {', '.join(f'{b}×{n}' for b, n in record['tuned'])}: {chosen}")
        for (batch, length), loss in losses(record).items():
            print(f"  {batch}×{length:<4} {loss:.3f} times its own best")


if __name__ == "__main__":
    main()
