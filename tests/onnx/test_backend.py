"""The official suite of ONNX backends: supported tests give the right results, and unsupported ones are refused before anything is
computed.

The command in docs/onnx.md counts the passing tests; here no test may be wrong, and exactly the tests in `refused.txt` are refused.
"""
from __future__ import annotations

import unittest
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx.backend.test
import pytest
from onnx.backend.test.loader import load_model_tests

import svod.onnx.backend as backend
from svod.errors import UnsupportedError

# tests whose expected numbers cannot be reached, with the reason
EXCLUDED = {
    **dict.fromkeys((f"test_bernoulli{kind}{form}_cpu" for kind in ("", "_double", "_seed") for form in ("", "_expanded")),
                    "random numbers of another generator"),
    "test_loop16_seq_none_cpu": "the runner of the onnx package cannot compare an optional with a sequence"}
# tests that svod refuses, by their names in this version of the onnx package; later versions have more tests
REFUSED = frozenset(Path(__file__).with_name("refused.txt").read_text().split())
VERSION = "1.23.2"
GROUPS = 2      # number of parts of the node tests, for two cores: each process that runs a part makes all cases

warnings.filterwarnings("ignore", category=RuntimeWarning)
DIRECTORIES = {"PyTorchConverted": "pytorch-converted", "PyTorchOperator": "pytorch-operator", "Real": "real", "Simple": "simple",
               "Node": "node"}


@cache
def suite(kind: str) -> Any:
    """The cases of one kind of test; making the node tests takes 14 seconds of processor time."""
    def of_kind(kind: str) -> list[Any]:
        return load_model_tests(kind=kind) if kind == wanted else []
    wanted = DIRECTORIES[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnx.backend.test.runner.load_model_tests", of_kind)
        return onnx.backend.test.BackendTest(backend, __name__).test_cases[f"OnnxBackend{kind}ModelTest"]


def check(kind: str, part: int = 0, parts: int = 1) -> None:
    """Run the tests of a kind: all give the right numbers, except the known tests that are refused."""
    case = suite(kind)
    names = [n for n in sorted(dir(case)) if n.startswith("test_") and n.endswith("_cpu") and n not in EXCLUDED][part::parts]
    wrong, refused = dict[str, str](), set[str]()
    for name in names:
        try:
            case(name).debug()
        except UnsupportedError:
            refused.add(name)
        except unittest.SkipTest:
            continue
        except Exception as e:
            wrong[name] = f"{type(e).__name__}: {e}"
    assert names and not wrong
    assert not refused - REFUSED or onnx.__version__ != VERSION, f"svod had these: {sorted(refused - REFUSED)}"
    assert not (REFUSED & set(names)) - refused, f"take them off refused.txt: {sorted((REFUSED & set(names)) - refused)}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(GROUPS))
def test_nodes(part: int) -> None:
    check("Node", part, GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PyTorchConverted", "PyTorchOperator", "Real", "Simple"])
def test_models(kind: str) -> None:
    check(kind)
