"""Programs of torch.export, in memory and from files, compiled by `svod.torch.compile`."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

from torch.export.experimental import _export_forward_backward  # noqa: E402

import svod.torch  # noqa: E402
from svod.errors import ArgumentError, ShapeError, UnsupportedError  # noqa: E402

STRICT = {"strict": True}


class Net(torch.nn.Module):
    """Tied weights, a buffer that is written and one that is not saved, arguments in containers, and outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.layer = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3), torch.nn.GRU(3, 2, batch_first=True)
        self.narrow.weight = torch.nn.Parameter(self.wide.weight.detach().mT.contiguous())
        self.again = self.narrow
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, words: Any, *, added: Any, factor: Any = None) -> Any:
        self.count.add_(1)
        with torch.no_grad():
            y = self.again(self.wide(words["x"]).relu()) * self.scale + self.narrow(added)
        return {"steps": self.layer(y)[0], "rest": (y.sum(), self.count * 1)}


def drawn(batch: int) -> tuple[Any, Any]:
    return {"x": torch.randn(batch, 2, 3)}, torch.randn(4)


def exported(model: Any) -> Any:
    words, added = drawn(3)
    shapes = {"words": {"x": {0: torch.export.Dim("batch", min=3, max=8)}}, "added": None, "factor": None}
    return torch.export.export(model, (words,), {"added": added, "factor": None}, dynamic_shapes=shapes)


def test_a_program_from_a_file(tmp_path: Path) -> None:
    model = Net().eval()
    torch.export.save(exported(model), tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")
    words, added = drawn(3)
    run = svod.torch.compile(program, words, added=added, factor=None, options=STRICT)
    assert run.function.name == "Net"
    for batch in (3, 7, 3):
        words, added = drawn(batch)
        torch.testing.assert_close(run(words, factor=None, added=added), model(words, added=added))
    assert program.state_dict["count"] == 3
    for t in (program.state_dict["wide.weight"], model.wide.weight):
        t.data.mul_(0.5)
    torch.testing.assert_close(run(words, added=added, factor=None), model(words, added=added))
    for batch in (2, 9):
        with pytest.raises(ShapeError, match=r"expected torch.float32 \(s\d+, 2, 3\) with 3 <= s\d+ <= 8, got torch.float32 \("):
            run(*drawn(batch)[:1], added=added, factor=None)


class Sums(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        x.add_(y)
        return x.sum(0)


def test_sizes_that_belong_together_and_arguments_that_are_written() -> None:
    n = torch.export.Dim("n")
    program = torch.export.export(Sums(), (torch.ones(4, 2), torch.ones(4, 2)), dynamic_shapes=({0: n}, {0: n}))
    run, x, y = svod.torch.compile(program, options=STRICT), torch.randn(5, 2), torch.randn(5, 2)
    wanted = x + y
    torch.testing.assert_close(run(x, y), wanted.sum(0))
    torch.testing.assert_close(x, wanted)
    with pytest.raises(ShapeError, match="argument 1: expected"):
        run(x, y[:4])


def test_what_a_program_is_not_compiled_for() -> None:
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    for given, named, kind, text in (
            ((torch.ones(4, 2),), {}, ShapeError, r"expected torch.float32 \(4, 3\), got torch.float32 \(4, 2\)"),
            ((torch.ones(4, 3).double(),), {}, ShapeError, r"got torch.float64 \(4, 3\)"),
            ((), {"x": torch.ones(4, 3)}, ArgumentError, r"was compiled for the arguments \(Tensor\), and is called with \(x=Tensor\)"),
            ((torch.ones(4, 3),), {"dynamic_shapes": {}}, ArgumentError, "belongs to torch.export.export"),
            ((torch.ones(4, 3),), {"mode": "fast"}, svod.errors.ConfigError, "mode='fast'")):
        with pytest.raises(kind, match=text):
            svod.torch.compile(program, *given, **named)


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.linear(x).square().sum()


def test_the_graph_of_a_backward_pass_is_refused() -> None:
    with torch.enable_grad():
        joint = _export_forward_backward(torch.export.export(Loss(), (torch.ones(4, 3),)))
    with pytest.raises(UnsupportedError, match="has the graph of a backward pass"):
        svod.torch.compile(joint)
