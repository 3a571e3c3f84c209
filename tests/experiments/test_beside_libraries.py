"""The scripts that compare single operations with other libraries: the results that they time, their races, and their lines."""
from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SIZES = (1, 2, 7, 61, 96, 100, 509, 1000)       # of which no vector width divides most


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module



@pytest.mark.parametrize("transform", ["rfft", "fft", "irfft", "rfft2", "fft2", "irfft2"])
def test_transforms_are_right(script: Any, transform: str) -> None:
    """Of each library, at random sizes: none is named as wrong, and the results are those of the definition."""
    module, rng = script("fourier_transforms"), np.random.default_rng(len(transform))
    for n in SIZES:
        case = module.Case(transform, (int(rng.integers(1, 20)), n))
        x = module.operand(case, rng)
        runs = module.contestants(case, x)
        assert list(runs)[-1] == "svod" and {"numpy", "svod"} <= set(runs)
        assert module.wrong(case, x, runs) == {}, case
        half = module.wrong(case, x, {"half": module.of_function(lambda case=case, x=x: 0.5 * module.exact(case, x))})
        assert half["half"] == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("operation", ["sort", "argsort", "topk"])
def test_sorts_are_right(script: Any, operation: str, dtype: str) -> None:
    module, rng = script("sorts"), np.random.default_rng(len(dtype))
    for n in SIZES:
        case = module.Case(operation, dtype, (int(rng.integers(1, 20)), n), min(n, 5) if operation == "topk" else 0)
        x = module.operand(case, rng)
        runs = module.contestants(case, x)
        assert "svod" in runs and ("numpy" in runs) == (dtype != "bfloat16")
        assert module.wrong(case, x, runs) == [], case
        if n > 2 and operation != "topk":
            turned = module.of_function(lambda case=case, x=x: module.expected(case, x)[:, ::-1])
            assert module.wrong(case, x, {"turned": turned}) == ["turned"]


@pytest.mark.parametrize("name", ["fourier_transforms", "sorts"])
def test_a_script_has_a_line_for_each_chosen_case(script: Any, name: str, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    module = script(name)
    small = {"first of 8": next(iter(module.CASES.values()))._replace(shape=(2, 8)),
             "second of 8": next(iter(module.CASES.values()))._replace(shape=(3, 8)),
             "third of 9": next(iter(module.CASES.values()))._replace(shape=(3, 9))}
    monkeypatch.setattr(module, "CASES", small)
    monkeypatch.setattr(sys, "argv", [name, "of 8", "--seconds", "0"])
    module.main()
    _, *lines = capsys.readouterr().out.splitlines()
    assert [text[:11].rstrip() for text in lines] == ["first of 8", "second of 8"]
    assert all("×" in text and "wrong" not in text and "differs" not in text for text in lines)
    monkeypatch.setattr(module, "wrong", lambda case, x, runs: {"svod": 0.5} if name == "fourier_transforms" else ["svod"])
    module.main()
    remark = {"fourier_transforms": "svod is wrong by 5.0e-01", "sorts": "svod differs"}[name]
    assert all(text.endswith(remark) for text in capsys.readouterr().out.splitlines()[1:])


class Clock:
    """A clock that only runs move, each by its seconds; and their order."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, list[str]()

    def run(self, name: str, seconds: float) -> Any:
        def once() -> None:
            self.now += seconds
            self.order.append(name)
        return once


def test_a_race_is_in_turns_and_leaves_out_the_slow(script: Any) -> None:
    module, clock, pauses = script("beside_libraries"), Clock(), list[float]()
    runs = {"svod": clock.run("svod", 1.0), "near": clock.run("near", 3.0), "far": clock.run("far", 100.0)}
    times = module.race(runs, 50.0, clock=lambda: clock.now, sleep=pauses.append)
    rounds = len(times["svod"])
    assert times == {"svod": [1.0] * rounds, "near": [3.0] * rounds, "far": [100.0]}
    assert rounds == math.ceil(50.0 / 8.0), "a run before each that is timed"
    assert len(pauses) == 2 * rounds
    raced = clock.order[clock.order.index("far") + 1:]
    raced = raced[raced.index("far") + 1:]
    turns = [raced[i:i + 4] for i in range(0, len(raced), 4)]
    assert len(turns) == rounds and all(sorted(turn) == ["near", "near", "svod", "svod"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) == 2, "the order is drawn"


def test_a_line_has_medians_and_the_best_of_the_others(script: Any) -> None:
    module = script("beside_libraries")
    times = {"svod": [1e-3] * 9 + [9e-3], "numpy": [2e-3] * 10, "torch": [5e-3] * 10}
    text = module.line("a case", times, ("numpy", "scipy", "torch"))
    assert text.split() == ["a", "case", "1.000", "2.000", "–", "5.000", "numpy", "2.00×", "(2.00–2.00)"]
    assert module.line("a case", {"svod": [1e-3], "numpy": [2e-3, 2e-3]}, ("numpy",)).endswith("numpy 2.00×")
    assert module.line("a case", {"svod": [1e-3]}, ("numpy",)).split() == ["a", "case", "1.000", "–"]
    assert len(module.header("", ("numpy", "scipy", "torch")).split("times")[0].rstrip()) == len(text.split("   numpy")[0])


def test_a_library_that_is_not_installed_is_left_out_once(script: Any, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    module = script("beside_libraries")
    module.library.cache_clear()
    for name in module.LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    try:
        assert [module.library(name) for name in (*module.LIBRARIES, *module.LIBRARIES)] == [None] * 6
        assert capsys.readouterr().err.splitlines() == [f"{name} is left out, as it is not installed: pip install {package}"
                                                        for name, package in module.LIBRARIES.items()]
        transforms = script("fourier_transforms")
        case = transforms.CASES["rfft, 1 row of 1000"]
        assert set(transforms.contestants(case, transforms.operand(case, np.random.default_rng(0)))) == {"numpy", "svod"}
    finally:
        module.library.cache_clear()


def test_cases_are_chosen_by_parts_of_their_names(script: Any) -> None:
    module, sorts = script("beside_libraries"), script("sorts")
    assert module.chosen(["a of 8", "b of 8", "b of 9"], ["of 9", "a"]) == ["a of 8", "b of 9"]
    assert module.chosen(sorts.CASES, []) == list(sorts.CASES) and len(module.chosen(sorts.CASES, ["argsort"])) == 25
