"""Dumps of a plan after each pass, by name and level, with cold and warm caches; printed ASTs can be read back."""
from __future__ import annotations

import re

import pytest

from svod.compile.plan.dump import PLAN_PASSES, passes_of
from svod.config import NONE, PrepareConfig
from svod.core.ir.text import parse_ast
from svod.core.ir.uop import Ops
from svod.errors import ConfigError
from svod.prepare import kernel_of
from svod.tensor import Tensor
from tests.core.corpus import data
from tests.draws import a_quarter


def model() -> Tensor:
    """Make a product and its softmax, which are two kernels."""
    return (data(16, 8) @ data(8, 24)).softmax(-1)


def dumped(capsys: pytest.CaptureFixture[str], tensor: Tensor, **options: object) -> str:
    tensor.prepare(config=PrepareConfig(db=NONE, threads=1, **options))  # type: ignore[arg-type]
    return capsys.readouterr().err


def sections(text: str) -> list[tuple[str, str]]:
    """Split a dump into its sections (header, content)."""
    parts = re.split(r"^-- (.*) --$", text, flags=re.MULTILINE)[1:]
    return [(h, c.strip("\n")) for h, c in zip(parts[::2], parts[1::2], strict=True)]


@pytest.mark.parametrize("name", a_quarter([p.name for p in PLAN_PASSES]))
def test_each_pass_can_be_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = sections(dumped(capsys, model(), dump_after=name))
    assert found and all(h.split(":")[0] == name and content for h, content in found)
    if name in ("rangeify", "axes", "canonical"):
        assert [h for h, _ in found] == [h for h, _ in sections(dumped(capsys, model(), dump_after=name))], "a known kernel is printed too"
        assert all(parse_ast(content).op is Ops.SINK for _, content in found) and len(found) == 2
        assert found[0][0].startswith(f"{name}: gemm_0 (") and found[1][0].startswith(f"{name}: softmax_1 (")


def test_what_the_passes_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = dumped(capsys, model(), dump_after="memory, canonical,schedule")
    assert [h.split(":")[0] for h, _ in sections(text)] == ["canonical", "canonical", "schedule", "memory"], "in the order of the passes"
    by_name = dict(sections(text))
    assert by_name["schedule"].split("\n")[0].startswith("gemm_0: level 0, b0 ← b1, b2; heuristic; a reduction read at several places")
    assert by_name["schedule"].split("\n")[1].startswith("softmax_1: level 1, b3 ← b0; heuristic; output")
    assert "b0: intermediate, 1.54 kB" in by_name["memory"] and "arena: 1.54 kB" in by_name["memory"]
    (key,) = re.findall(r"canonical: gemm_0 \((\w+)\)", text)
    assert kernel_of(parse_ast(by_name[f"canonical: gemm_0 ({key})"])).key.startswith(key)


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    levels = {}
    for level in range(6):
        levels[level] = [p.name for p in passes_of(PrepareConfig(debug=level))]
    assert levels[0] == [] and levels[1] == ["schedule"] and levels[3] == ["canonical", "schedule", "opts"]
    assert levels[5] == [*levels[3], "linear", "llvm"]
    assert dumped(capsys, model()) == "" and "define void" in dumped(capsys, model(), debug=5)


def test_levels_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, level in (("2", 2), ("true", 0), ("app:*", 0), ("", None), ("9", 9)):
        monkeypatch.setenv("DEBUG", text)
        assert PrepareConfig.from_env().debug == level
    assert passes_of(PrepareConfig(debug=9)) == passes_of(PrepareConfig(debug=5))
    for text in ("-1", "2.5", ".5", "2x"):
        monkeypatch.setenv("DEBUG", text)
        with pytest.raises(ConfigError, match=f"DEBUG='{text}' is not usable; accepted: an integer, at least 0"):
            PrepareConfig.from_env()


def test_unknown_passes_are_named() -> None:
    with pytest.raises(ConfigError, match="no pass 'lower'; the passes are normalize, cut, rangeify"):
        passes_of(PrepareConfig(dump_after="cut,lower"))


def test_kernels_that_occur_twice_and_plans_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    every = ",".join(p.name for p in PLAN_PASSES)
    assert "no kernels" in dumped(capsys, data(4).reshape(2, 2), dump_after=every)
    x, w = data(16, 16), data(16, 16)
    twice = [h for h, _ in sections(dumped(capsys, ((x @ w).contiguous() @ w), dump_after=every)) if h.startswith("linear")]
    assert len(twice) == 1 and twice[0].startswith("linear: gemm_0 (")


def test_a_stage_that_the_device_does_not_have_is_refused_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    by_name = dict(sections(dumped(capsys, data(8) + 1, dump_after="asm,sass", device="CPU:interpreter")))
    assert len(by_name) == 2 and all(text.startswith("; the compiler interpreter ") for text in by_name.values())
