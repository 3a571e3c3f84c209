"""Result files: written runs are read back unchanged, and files of other formats are refused."""
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from svod.bench.results import VERSION, Run, Speedup, read_run, run_from_json, run_to_json, write_run
from svod.errors import FormatError
from tests.bench.example_run import DATA, example_model_run, example_run


def as_json() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(run_to_json(example_run())))
    return data


def plain(run: Run) -> Any:
    """The run as JSON, with numbers rounded to nine digits, because the last digits depend on the machine's mathematical library."""
    def rounded(text: str) -> float:
        return float(f"{float(text):.9g}")
    return json.loads(json.dumps(run_to_json(run)), parse_float=rounded, parse_int=rounded)


@pytest.mark.parametrize("make", [example_run, example_model_run])
def test_written_and_read_back(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(path, make())
    assert plain(read_run(path)) == plain(make())
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"] and path.stat().st_mode & 0o777 == 0o644


def test_example_files_are_current() -> None:
    """After a change of the format or of the figures, run python -m tests.bench.example_run."""
    for name, run in (("run", example_run()), ("run_slower", example_run({"gemm_1024": 1.3}, seed=1)), ("resnet18", example_model_run())):
        assert plain(read_run(DATA / f"{name}.json")) == plain(run), name


def test_numbers_are_finite(tmp_path: Path) -> None:
    text = (DATA / "run.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    data = as_json()
    data["load"]["steal"] = float("nan")
    path = tmp_path / "nan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match="is not JSON"):
        read_run(path)


@pytest.mark.parametrize(("text", "words"), [
    ("", ["is not JSON"]),
    ("{}", ["not a result of svod-bench"]),
    ("[1]", ["not a result of svod-bench"]),
    (json.dumps({"format": "svod-bench", "version": VERSION + 1}), [f"version {VERSION + 1}", f"reads version {VERSION}"]),
    (json.dumps({"format": "svod-bench"}), ["version None"]),
    (json.dumps({"format": "svod-bench", "version": VERSION}), ["settings"]),
])
def test_other_files_are_refused(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        read_run(path)
    assert "other.json" in str(caught.value) and all(w in str(caught.value) for w in words)


@pytest.mark.parametrize(("place", "value", "where"), [
    (("cases", 0, "contestants", 1, "samples", 3), "fast", r"`float`, got `str` - at `\$\.cases\[0\]\.contestants\[1\]\.samples\[3\]`"),
    (("cases", 0, "contestants", 1, "status"), "lucky", r"'lucky' - at `\$\.cases\[0\]\.contestants\[1\]\.status`"),
    (("cases", 0, "contestants", 1, "preallocated"), 1, "Expected `bool`, .*preallocated"),
    (("cases", 0, "rounds"), 1.5, "Expected `int`, .*rounds"),
    (("cases", 0, "rounds"), True, "Expected `int`, .*rounds"),
    (("cases", 0, "title"), None, "Expected `str`, .*title"),
    (("cases",), {}, "Expected `array`, .*cases"),
    (("machine",), [], "Expected `object`, .*machine"),
    (("ceilings", "dispatch"), [1.0], "length 2, .*dispatch"),
    (("groups", 0, "speedups"), {"a": "b"}, r"Expected `float`, .*speedups"),
])
def test_changed_files_are_refused_with_the_place(place: tuple[Any, ...], value: Any, where: str) -> None:
    data = as_json()
    at: Any = data
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    with pytest.raises(FormatError, match=where):
        run_from_json(data)


def test_a_missing_key_is_named_defaults_may_be_left_out_and_other_keys_are_ignored() -> None:
    data = as_json()
    data["machine"]["colour"] = "blue"
    del data["cases"][0]["contestants"][0]["remark"]
    assert run_from_json(copy.deepcopy(data)).cases[0].contestants[0].remark == ""
    del data["cases"][0]["title"]
    with pytest.raises(FormatError, match=r"`title` - at `\$\.cases\[0\]`"):
        run_from_json(data)


def test_a_difference_below_the_spread_is_none() -> None:
    assert Speedup(1.02, 0.99, 1.05).is_none and Speedup(1.5, None, None).is_none
    assert not Speedup(1.02, 1.01, 1.05).is_none and not Speedup(0.9, 0.8, 0.99).is_none


def test_lookups() -> None:
    run = example_run()
    case = run.case("sum_16m")
    assert case is not None and run.case("nothing") is None
    assert [p.name for p in case.peers] == ["numpy", "torch", "onnxruntime", "jax"]
    assert case.svod is case.outcome("tuned") and case.svod is not None and case.svod.same_as == "heuristic"
