"""Whether two versions of svod make the same kernels: keys, sketches and the LINEAR of many chains, recorded by one and compared by the
other.

    python experiments/linear_digests.py record before.json       # in a checkout of the version before
    python experiments/linear_digests.py compare before.json      # in the version after: exit status 1, and a line each, for what differs
    python experiments/linear_digests.py compare before.json --chains-only     # the recorded chains alone: the cost model may have changed

Kernels: the corpus of the tests, and those of the suites core, odd and models. Targets: AVX-512, AVX2, and AVX-512 with dot and tile
instructions, an H100, a GPU of WebGPU, and the toy device of the tests; none is the machine at hand, so that a record is the same
everywhere. Chains, per kernel and target: none, every sketch, the heuristic, and random ones, each with its predicted cycles. A comparison
replays the recorded chains, so it does not depend on how random chains are drawn. `--targets avx2,sm_90` records and compares some.
"""
from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from heuristics import kernels_of  # noqa: E402

# isort: split
from svod.bench.suites.suites import select_cases  # noqa: E402
from svod.compile.backend import Backend, backend_named  # noqa: E402
from svod.compile.lower.lower import lower  # noqa: E402
from svod.core.kernel.apply import apply_opts  # noqa: E402
from svod.core.kernel.kernel import Kernel  # noqa: E402
from svod.core.kernel.scheduler import Opt, Scheduler  # noqa: E402
from svod.core.machine.target import Target  # noqa: E402
from svod.errors import SvodError  # noqa: E402
from tests.chains import group_state, random_state  # noqa: E402
from tests.compile.cuda.target import card_target  # noqa: E402
from tests.core.corpus import BUILDERS, CORPUS  # noqa: E402
from tests.core.cost.groups.test_group_cost import GPU  # noqa: E402
from tests.toy_backend.backend import Toy  # noqa: E402
from tests.toy_backend.target import TOY  # noqa: E402

AVX2 = ("avx2", "f16c", "fma", "sse4")
AVX512 = (*AVX2[:1], "avx512f", *AVX2[1:])
TARGETS = {
    "avx512": Target("x86_64", "znver4", AVX512, 64, 32, 32 << 10, 1 << 20, 32 << 20, 2, has_scaleb=True,
                     has_mask_registers=True),
    "avx2": Target("x86_64", "haswell", AVX2, 32, 16, 32 << 10, 256 << 10, 8 << 20, 8),
    "amx": Target("x86_64", "sapphirerapids", ("amx", "avx2", "avx512f", "bf16", "f16c", "fma", "sse4", "vnni"), 64, 32, 48 << 10, 2 << 20,
                  32 << 20, 2, has_scaleb=True, has_mask_registers=True),
    "sm_90": card_target("sm_90"), "webgpu": replace(GPU, subgroup=0, software_lanes=8, units=2, device="WEBGPU"), "toy": TOY,
}
RANDOM_CHAINS = 4       # for each kernel and target
LONGEST = 10            # opts of a random chain


def all_kernels() -> Iterator[tuple[str, Kernel]]:
    """The kernels by name, each key once."""
    seen = set()
    for name in BUILDERS:
        yield f"corpus/{name}", (kernel := Kernel(CORPUS[name]()))
        seen.add(kernel.key)
    for suite in ("core", "odd", "models"):
        for case in select_cases(suite):
            for name, kernel in kernels_of(case):
                if kernel.key not in seen:
                    seen.add(kernel.key)
                    yield f"{suite}/{name}", kernel


def backend_of(target: Target) -> Backend:
    """The backend that prices and chooses for a target."""
    return Toy() if target is TOY else backend_named(target.device)


def outcome(of: Callable[[], str]) -> str:
    """The result of `of`, or the text of its error."""
    try:
        return of()
    except SvodError as e:
        return f"{type(e).__name__}: {e}"


def describe(state: Scheduler) -> dict[str, Any]:
    """A chain, the state that it ends in, its predicted cycles and its LINEAR; or why there are none."""
    return {"chain": [o.to_json() for o in state.applied_opts], "state": state.digest.hex(),
            "cycles": outcome(lambda: repr(backend_of(state.target).cost(state).cycles)), "linear": outcome(lambda: lower(state).digest)}


def record(targets: dict[str, Target]) -> dict[str, Any]:
    """Everything, as JSON-able data."""
    out: dict[str, Any] = {}
    for name, kernel in all_kernels():
        entry: dict[str, Any] = {"key": kernel.key, "targets": {}}
        out[name] = entry
        if kernel.library_kernel is not None:
            continue
        for target_name, target in targets.items():
            base, backend = Scheduler(kernel, target), backend_of(target)
            rng, draw = random.Random(f"{name} {target_name}"), group_state if target.has_groups else random_state
            drawn = [draw(rng, base, rng.randint(1, LONGEST)) for _ in range(RANDOM_CHAINS)]
            entry["targets"][target_name] = {
                "heuristic": describe(backend.heuristic(base)), "sketches": [describe(s) for s in backend.sketches(base)],
                "chains": [describe(s) for s in (base, *drawn)]}
    return out


def replay(kernel: Kernel, target: Target, then: dict[str, Any]) -> dict[str, Any]:
    """The present results of a recorded chain."""
    try:
        return describe(apply_opts(Scheduler(kernel, target), [Opt.from_json(o) for o in then["chain"]]))
    except SvodError as e:
        return {"chain": then["chain"], "state": f"{type(e).__name__}: {e}", "cycles": "", "linear": ""}


def compare(before: dict[str, Any], targets: dict[str, Target], chains_only: bool) -> list[str]:
    """A line for everything that differs."""
    lines = []
    told = ("state", "linear") if chains_only else ("state", "linear", "cycles")
    kernels = dict(all_kernels())
    for name, entry in before.items():
        kernel = kernels.pop(name, None)
        if kernel is None or kernel.key != entry["key"]:
            lines.append(f"{name}: the kernel is gone" if kernel is None else f"{name}: the key is {kernel.key}, was {entry['key']}")
            continue
        for target_name, then in entry["targets"].items():
            if target_name not in targets:
                continue
            target = targets[target_name]
            for kind, old in [*(("sketch", s) for s in then["sketches"]), ("heuristic", then["heuristic"]),
                              *(("chain", c) for c in then["chains"])]:
                now = replay(kernel, target, old)
                lines += [f"{name} {target_name}: {kind} {json.dumps(old['chain'])}: {what} {old[what]} → {now[what]}"
                          for what in told if now[what] != old[what]][:1]
            if not chains_only:
                base, backend = Scheduler(kernel, target), backend_of(target)
                if (chosen := backend.heuristic(base).digest.hex()) != then["heuristic"]["state"]:
                    lines.append(f"{name} {target_name}: the heuristic chooses {chosen}, not {then['heuristic']['state']}")
                if [s.digest.hex() for s in backend.sketches(base)] != [s["state"] for s in then["sketches"]]:
                    lines.append(f"{name} {target_name}: the sketches are others, or in another order")
    return lines + [f"{name}: the kernel is new" for name in kernels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--chains-only", action="store_true", help="leave out what the heuristic chooses, the list of sketches, and cycles")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names of targets, with commas between them (%(default)s)")
    args = parser.parse_args()
    targets = {name: TARGETS[name] for name in args.targets.split(",")}
    start = time.perf_counter()
    if args.action == "record":
        data = record(targets)
        args.file.write_text(json.dumps(data, indent=0), encoding="utf-8")
        lines = []
    else:
        data = json.loads(args.file.read_text(encoding="utf-8"))
        lines = compare(data, targets, args.chains_only)
    states = sum(len(t["sketches"]) + 1 + len(t["chains"]) for e in data.values()
                 for name, t in e["targets"].items() if name in targets)
    print("\n".join([*lines, f"{len(data)} kernels, {states} chains, {len(lines)} differences, {time.perf_counter() - start:.0f} s"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
