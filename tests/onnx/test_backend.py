"""The official suite of ONNX backends: everything that svod has is right, and what it has not is refused before anything is computed.

The command in docs/onnx.md counts what passes; here no test may be wrong, and the number that passes may not shrink.
"""
from __future__ import annotations

import unittest
import warnings
from typing import Any

import onnx.backend.test
import pytest

import svod.onnx.backend as backend
from svod.errors import UnsupportedError

#: Tests whose numbers cannot be the expected ones, with the reason.
EXCLUDED = {
    **dict.fromkeys((f"test_bernoulli{kind}{form}_cpu" for kind in ("", "_double", "_seed") for form in ("", "_expanded")),
                    "random numbers of another generator"),
    "test_loop16_seq_none_cpu": "the runner of the onnx package cannot compare an optional with a sequence"}
LEAST = {"Node": 1600, "PyTorchConverted": 82, "PyTorchOperator": 35, "Real": 9, "Simple": 15}
GROUPS = 8      # of the node tests, so that workers share them

warnings.filterwarnings("ignore", category=RuntimeWarning)
SUITE: dict[str, Any] = {}


def suite() -> dict[str, Any]:
    """The cases of the suite by kind, made once: it takes seconds."""
    if not SUITE:
        SUITE.update(onnx.backend.test.BackendTest(backend, __name__).test_cases)
    return SUITE


def outcomes(kind: str, part: int = 0, parts: int = 1) -> tuple[int, dict[str, str]]:
    """How many tests of a kind pass, and what is wrong with those that neither pass nor are refused."""
    case = suite()[f"OnnxBackend{kind}ModelTest"]
    passed, wrong = 0, {}
    names = [n for n in sorted(dir(case)) if n.startswith("test_") and n.endswith("_cpu") and n not in EXCLUDED]
    for name in names[part::parts]:
        result = unittest.TestResult()
        case(name).run(result)
        problems = [text for _, text in (*result.errors, *result.failures)]
        if not problems:
            passed += not result.skipped
        elif UnsupportedError.__name__ not in problems[0].splitlines()[-1] and "UnsupportedError" not in problems[0]:
            wrong[name] = problems[0].strip().splitlines()[-1]
    return passed, wrong


@pytest.mark.parametrize("part", range(GROUPS))
def test_nodes(part: int) -> None:
    passed, wrong = outcomes("Node", part, GROUPS)
    assert not wrong
    assert passed >= LEAST["Node"] // GROUPS - 25, f"{passed} passed of this part: fewer than before"


@pytest.mark.parametrize("kind", ["PyTorchConverted", "PyTorchOperator", "Real", "Simple"])
def test_models(kind: str) -> None:
    passed, wrong = outcomes(kind)
    assert not wrong
    assert passed >= LEAST[kind]
