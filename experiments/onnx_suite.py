"""The official suite of ONNX backends, counted: svod, or onnxruntime beside it.

    python experiments/onnx_suite.py [--backend svod.onnx.backend|onnxruntime.backend] [--only PART] [--verbose]

A test is right, refused (UnsupportedError, or skipped by the backend), or wrong. The tests that tests/onnx/test_backend.py excludes are
counted apart. Of other backends any error but a difference of numbers is a refusal.
"""
from __future__ import annotations

import argparse
import importlib
import sys
import unittest
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

OURS = "svod.onnx.backend"
KINDS = ("Node", "PyTorchConverted", "PyTorchOperator", "Real", "Simple")


def run(backend: str, kind: str, part: int, parts: int, only: str) -> dict[str, str]:
    """The outcome of every test of a kind."""
    warnings.simplefilter("ignore")
    import onnx.backend.test

    from tests.onnx.test_backend import EXCLUDED

    case = onnx.backend.test.BackendTest(importlib.import_module(backend), __name__).test_cases[f"OnnxBackend{kind}ModelTest"]
    found = {}
    for name in [n for n in sorted(dir(case)) if n.startswith("test_") and n.endswith("_cpu") and only in n][part::parts]:
        result = unittest.TestResult()
        case(name).run(result)
        problems = [text for _, text in (*result.errors, *result.failures)]
        if name in EXCLUDED:
            found[name] = "excluded"
        elif backend != OURS and problems and not any("AssertionError" in p for p in problems):
            found[name] = "refused"         # others have errors of their own
        elif result.skipped or any("UnsupportedError" in p or "NotImplemented" in p for p in problems):
            found[name] = "refused"
        else:
            found[name] = f"wrong: {problems[0].strip().splitlines()[-1]}" if problems else "right"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default=OURS)
    parser.add_argument("--only", default="", metavar="PART", help="tests with PART in their names")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="name the tests that are wrong")
    args = parser.parse_args()
    print("| tests | all | right | refused | wrong | excluded |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    with ProcessPoolExecutor(args.processes) as pool:
        for kind in KINDS:
            parts = [pool.submit(run, args.backend, kind, p, args.processes, args.only) for p in range(args.processes)]
            found = {name: what for part in parts for name, what in part.result().items()}
            counts = Counter(what.split(":")[0] for what in found.values())
            shown = " | ".join(str(counts[w]) for w in ("right", "refused", "wrong", "excluded"))
            print(f"| {kind} | {len(found)} | {shown} |", flush=True)
            if args.verbose:
                print("\n".join(f"    {name}: {what}" for name, what in sorted(found.items()) if what.startswith("wrong")))


if __name__ == "__main__":
    main()
