"""Convolutions are computed by transforms where these are predicted to be faster, however a graph was made, unless a policy forbids it."""
from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import svod
import svod.onnx
from svod import PrepareConfig, Tensor
from svod.core.convolution.by_fourier import by_fourier
from svod.core.graph.graph import sink
from svod.core.ir.uop import Ops
from svod.tune.plans.convolutions import Rewritten, with_transforms
from svod.tune.plans.predicted_forms import Predicted
from svod.tune.resolved import resolve
from tests.core.convolution.test_by_fourier import direct

RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((1, 2, 20000)).astype(np.float32), RNG.standard_normal((2, 1, 3001)).astype(np.float32)
MANY_X, MANY_W = RNG.standard_normal((1, 32, 40, 40)).astype(np.float32), RNG.standard_normal((32, 32, 15, 15)).astype(np.float32)
Array = np.ndarray[Any, Any]


def transforms(plan: Any) -> int:
    """The number of kernels of a plan that transform."""
    return sum(k.name.startswith(("fourier", "filter")) for k in plan.kernels)


def is_close(got: Array, want: Array) -> bool:
    return bool(np.abs(got - want).max() < 5e-6 * np.abs(want).max())


@pytest.mark.parametrize("is_constant", [True, False])
def test_long_taps(is_constant: bool) -> None:
    w = Tensor(W)
    y = Tensor(X).conv1d(w, padding=5, groups=2).relu()
    plan = y.prepare(constants=[w] if is_constant else [])
    plan.execute()
    assert transforms(plan) == (1 if is_constant else 2)       # constant taps are transformed once, at prepare
    assert is_close(y.numpy(), np.maximum(direct(X, W, 5, 2), 0))


def test_many_channels() -> None:
    w = Tensor(MANY_W)
    y = Tensor(MANY_X).conv2d(w, padding=7)
    plan = y.prepare(constants=[w])
    plan.execute()
    assert transforms(plan) == 4
    assert is_close(y.numpy(), direct(MANY_X, MANY_W, 7, 1))


def test_one_convolution_behind_another() -> None:
    w = Tensor(W)
    y = Tensor(X).conv1d(w, groups=2).conv1d(w, groups=2)
    y.prepare(constants=[w]).execute()
    assert is_close(y.numpy(), direct(direct(X, W, 0, 2), W, 0, 2))


def test_few_taps_stay_direct() -> None:
    w = Tensor(np.ones((2, 1, 3), np.float32))
    assert transforms(Tensor(X).conv1d(w, groups=2).prepare(constants=[w])) == 0


def test_the_policy_same_keeps_the_direct_form() -> None:
    w = Tensor(W[:, :, :601])
    assert transforms(Tensor(X[..., :3000]).conv1d(w, groups=2).prepare(constants=[w]))
    assert not transforms(Tensor(X[..., :3000]).conv1d(w, groups=2).prepare(PrepareConfig(numerics="same"), constants=[w]))


def test_without_opts_the_direct_form_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_NOOPT", "1")
    w = Tensor(W[:, :, :601])
    assert not transforms(Tensor(X[..., :3000]).conv1d(w, groups=2).prepare(constants=[w]))


def test_limit_of_transformed_weights(caplog: pytest.LogCaptureFixture) -> None:
    w = Tensor(W)
    with caplog.at_level(logging.WARNING, logger="svod"):
        assert not transforms(Tensor(X).conv1d(w, groups=2).prepare(PrepareConfig(transformed_mb=0), constants=[w]))
    assert "1 convolution of a plan computes directly" in caplog.text


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The block lengths of the convolutions that are rewritten during a test."""
    found: list[Any] = []

    def spy(*given: Any) -> Any:
        found.append(given[-1])
        return by_fourier(*given)
    monkeypatch.setattr("svod.tune.plans.convolutions.by_fourier", spy)
    return found


def test_onnx(rewritten: list[Any]) -> None:
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    node = make.make_node("Conv", ["x", "w"], ["y"], group=2)
    graph = make.make_graph([node], "g", [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
                            [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)], [onnx.numpy_helper.from_array(W, "w")])
    model = svod.onnx.load(make.make_model(graph).SerializeToString())
    assert is_close(np.asarray(model(x=X)[0]), direct(X, W, 0, 2)) and rewritten


def test_torch_compile(rewritten: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    import svod.torch  # noqa: F401
    layer = torch.nn.Conv1d(2, 2, W.shape[-1], groups=2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(W))
        got = torch.compile(layer, backend="svod")(torch.from_numpy(X))
    assert is_close(got.numpy(), direct(X, W, 0, 2)) and rewritten


class Limited:
    """Convolutions of X whose forms are close, by the number of their taps, of whose transformed weights the limit allows those of one
    convolution. `transformed`: the numbers of taps with which transforms are predicted to be faster."""

    config = PrepareConfig(db=":none:", transformed_mb=1.5 * 2 * 2 * 4096 * 4 / 2**20)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transformed: set[int]) -> None:
        monkeypatch.setattr("svod.tune.plans.convolutions.predicted_forms", lambda u, c, z, *_, **__: Predicted(
            (4096,), 1.0, 0.8 if (is_faster := z.taps[0] in transformed) else 1.0, is_faster))

    def forms(self, y: Tensor, other: str = "") -> Rewritten:
        graph = sink(y.uop)
        return with_transforms(graph, frozenset(graph.walk(Ops.BUFFER)), resolve(self.config), other)


def taps(count: int) -> Tensor:
    return Tensor(np.ascontiguousarray(W[:, :, :count]))


def test_a_plan_in_another_form_differs_in_one_convolution_within_the_limit(rewritten: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case, y = Limited(monkeypatch, {2001, 2003}), Tensor(X).conv1d(taps(2001), groups=2).conv1d(taps(2003), groups=2)
    first, second = case.forms(y).forms
    assert (first.is_transformed, first.is_open) == (True, True) and (second.is_transformed, second.is_open) == (False, False)
    for other, count in (("", 1), (first.key, 0), (second.key, 1)):
        rewritten.clear()
        case.forms(y, other)
        assert len(rewritten) == count


def test_a_form_that_takes_the_room_of_another_convolution_is_not_open(rewritten: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case, y = Limited(monkeypatch, {2003}), Tensor(X).conv1d(taps(2001), groups=2).conv1d(taps(2003), groups=2)
    first, second = case.forms(y).forms
    assert (first.is_transformed, first.is_open) == (False, False) and (second.is_transformed, second.is_open) == (True, True)
    rewritten.clear()
    case.forms(y, first.key)
    assert len(rewritten) == 1


def test_equal_convolutions_of_which_one_fits_are_not_timed(rewritten: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case, w = Limited(monkeypatch, {2001}), taps(2001)
    y = Tensor(X).conv1d(w, groups=2) + Tensor(X + 1).conv1d(w, groups=2)
    (form,) = case.forms(y).forms
    assert (form.is_transformed, form.is_open) == (False, False)
    for other in ("", form.key):
        rewritten.clear()
        case.forms(y, other)
        assert len(rewritten) == 1
