"""A table of measured chains, for a test that the predictions still rank them: sketches and random chains of the suites' kernels, timed.

    python experiments/measured_chains.py measure tests/core/cost/measured/x86_64-znver3-avx2-t2.jsonl --seconds 420
    SVOD_CAPTURE=kernels python model.py; python experiments/measured_chains.py measure TABLE --capture kernels     # kernels of a program
    python experiments/measured_chains.py rank tests/core/cost/measured/x86_64-znver3-avx2-t2.jsonl     # correlation and loss per kernel

The table is JSON Lines: the target, then a line per kernel with its suite, or its AST if it is of no suite, and its chains, each with the
fastest sample in microseconds. The kernels are drawn in random order until the time is over. Times are of a machine that may do other
things: the test reads their order, and how much slower the chain that is predicted fastest is than the fastest one (the loss).
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from heuristics import Machine, captured_kernels, kernels_of  # noqa: E402

# isort: split
from svod.bench.suites.suites import select_cases  # noqa: E402
from svod.bench.timer import calibrate, take_sample  # noqa: E402
from svod.compile.backend import backend_named  # noqa: E402
from svod.core.ir.serialize import ast_to_data, data_to_ast  # noqa: E402
from svod.core.kernel.apply import apply_opts  # noqa: E402
from svod.core.kernel.kernel import Kernel  # noqa: E402
from svod.core.kernel.scheduler import Opt, Scheduler  # noqa: E402
from svod.core.machine.target import HOST, Target  # noqa: E402
from svod.errors import KernelOptError, SvodError  # noqa: E402
from tests.chains import random_state  # noqa: E402

SUITES = ("core", "odd", "models")
SKETCHES, RANDOM = 12, 6        # chains of a kernel, at most
SLOWEST = 30.0                  # chains predicted slower than so many times the fastest are left out
ROUNDS = 5


def candidates(kernel: Kernel, target: Target, rng: random.Random) -> list[Scheduler]:
    """Sketches from the one predicted fastest to the one predicted slowest, and random chains."""
    base, backend = Scheduler(kernel, target), backend_named(target.device)

    def cycles(state: Scheduler) -> float:
        return backend.cost(state).cycles
    ranked = sorted([backend.heuristic(base), *backend.sketches(base)], key=cycles)
    chosen = ranked[::max(1, len(ranked) // SKETCHES)][:SKETCHES]
    for _ in range(RANDOM):
        start = rng.choice(chosen)
        try:
            chosen.append(random_state(rng, start if rng.random() < 0.7 else base, rng.randint(1, 4)))
        except KernelOptError:
            continue
    return [s for s in {s.digest: s for s in chosen}.values() if cycles(s) <= SLOWEST * cycles(ranked[0])]


def measured(kernel: Kernel, target: Target, rng: random.Random) -> list[tuple[list[Any], float]]:
    """(chain, microseconds) of some chains of a kernel: the least of `ROUNDS` samples, each round with a sample of every chain, as a busy
    moment makes those slower that follow one another."""
    machine, timed = Machine(kernel, target), []
    for state in candidates(kernel, target, rng):
        try:
            contestant = machine.contestant(state)
        except SvodError:
            continue        # it cannot be lowered
        contestant.run(1)
        timed.append((state, contestant, *calibrate(contestant)))
    rounds = [[take_sample(contestant, repeats, call) for _, contestant, repeats, call in timed] for _ in range(ROUNDS)]
    return [([o.to_json() for o in state.applied_opts], round(min(samples) * 1e6, 3))
            for (state, *_), samples in zip(timed, zip(*rounds, strict=True), strict=True)]


def data_of(target: Target) -> dict[str, Any]:
    """The fields of a target that predictions read."""
    fields = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
    return {name: value for name, value in fields.items() if isinstance(value, str | int | float | tuple)}


def kernels_to_measure(capture: str, rng: random.Random) -> Iterator[tuple[dict[str, str], Kernel]]:
    """(where a table's reader finds the kernel, the kernel), in random order: the kernels of a capture, or without one of the suites."""
    if capture:
        captured = list(captured_kernels(capture, "*"))
        yield from [({"kernel": name, "ast": ast_to_data(kernel.ast)}, kernel) for name, kernel in rng.sample(captured, len(captured))]
        return
    cases = [(suite, case) for suite in SUITES for case in select_cases(suite)]
    rng.shuffle(cases)
    for suite, case in cases:
        yield from [({"suite": suite, "case": case.name, "kernel": name}, kernel) for name, kernel in kernels_of(case)]


def measure(file: Path, seconds: float, seed: int, capture: str) -> None:
    """Write the table of the machine at hand, or add kernels to it. `capture`: the folder of a capture; "": the suites."""
    target, rng, end, seen = backend_named(HOST).target(), random.Random(seed), time.monotonic() + seconds, set[str]()
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        known, lines = read(file)
        if data_of(known) != data_of(target):
            raise SystemExit(f"{file} is the table of another machine")
        seen.update(line["key"] for line in lines)
    else:
        file.write_text(json.dumps({"target": data_of(target)}) + "\n", encoding="utf-8")
    with file.open("a", encoding="utf-8") as out:
        for place, kernel in kernels_to_measure(capture, rng):
            if time.monotonic() < end and kernel.key not in seen and kernel.library_kernel is None:
                seen.add(kernel.key)
                line = {**place, "key": kernel.key, "chains": measured(kernel, target, rng)}
                print(json.dumps(line, separators=(",", ":")), file=out, flush=True)


def read(file: Path) -> tuple[Target, list[dict[str, Any]]]:
    """The target of a table and its kernels."""
    head, *lines = file.read_text(encoding="utf-8").splitlines()
    fields = json.loads(head)["target"]
    return Target(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}), [json.loads(line) for line in lines]


def replayed(file: Path) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """(kernel, its (predicted cycles, measured microseconds)) of a table, with today's cost model."""
    target, lines = read(file)
    backend, by_case = backend_named(target.device), dict[tuple[str, str], dict[str, Kernel]]()
    for line in lines:
        found = (line.get("suite", ""), line.get("case", ""))
        if found not in by_case and "ast" not in line:
            by_case[found] = {n: k for case in select_cases(*found) for n, k in kernels_of(case)}
        base = Scheduler(Kernel(data_to_ast(line["ast"])) if "ast" in line else by_case[found][line["kernel"]], target)
        yield line["kernel"], [(backend.cost(apply_opts(base, [Opt.from_json(o) for o in chain])).cycles, microseconds)
                               for chain, microseconds in line["chains"]]


def spearman(pairs: list[tuple[float, float]]) -> float:
    """The rank correlation of pairs. Equal values share the mean of their ranks."""
    columns = []
    for column in zip(*pairs, strict=True):
        ordered = sorted(column)
        first = {x: i for i, x in reversed(list(enumerate(ordered)))}
        columns.append([first[x] + (ordered.count(x) - 1) / 2 for x in column])
    a, b = columns
    return statistics.correlation(a, b) if len(set(a)) > 1 and len(set(b)) > 1 else 1.0


def correlations(kernels: list[tuple[str, list[tuple[float, float]]]]) -> tuple[float, float]:
    """(mean over the kernels with three chains or more, over all chains) of the rank correlation. All: of times relative to the fastest of
    their kernel, so that the sizes of kernels do not count."""
    within = [spearman(pairs) for _, pairs in kernels if len(pairs) > 2]
    pooled = []
    for _, pairs in kernels:
        least = min([p for p, _ in pairs], default=1.0), min([t for _, t in pairs], default=1.0)
        pooled += [(p / least[0], t / least[1]) for p, t in pairs] if len(pairs) > 1 else []
    return statistics.fmean(within), spearman(pooled)


def loss(pairs: list[tuple[float, float]]) -> float:
    """The time of the chain that is predicted fastest, as a multiple of the fastest chain's."""
    return min(pairs)[1] / min(t for _, t in pairs)


def mean_loss(kernels: list[tuple[str, list[tuple[float, float]]]]) -> float:
    """The geometric mean of the kernels' losses."""
    return statistics.geometric_mean([loss(pairs) for _, pairs in kernels])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "rank"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", default="", metavar="FOLDER", help="Measure the kernels of this capture instead of the suites'.")
    args = parser.parse_args()
    if args.action == "measure":
        measure(args.file, args.seconds, args.seed, args.capture)
    kernels = list(replayed(args.file))
    for name, pairs in kernels:
        print(f"{name:28} {len(pairs):3} chains  rank {spearman(pairs) if len(pairs) > 2 else float('nan'):5.2f}  loss {loss(pairs):5.2f}")
    within, pooled = correlations(kernels)
    losses = [loss(pairs) for _, pairs in kernels]
    print(f"{len(kernels)} kernels, {sum(len(p) for _, p in kernels)} chains: {within:.3f} within kernels (mean), {pooled:.3f} over all; "
          f"loss {mean_loss(kernels):.3f} (geometric mean), {max(losses):.3f} (largest)")


if __name__ == "__main__":
    main()
