"""Chains of steps that read a value directly and through a view: the number of paths through such a chain doubles with every step.

Each chain gives NumPy's numbers in float64, and its work grows at most as the square of its length."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from svod import Tensor
from tests.growth import check_growth

Step = Callable[[Any], Any]
N = 8
ORDER, OTHER = np.array([3, 1, 4, 1, 5, 2, 6, 0]), np.array([7, 1, 0, 2, 5, 3, 6, 4])
X = np.random.default_rng(0).standard_normal((N, N)).astype(np.float32)
BOX = np.full((1, 1, 3, 3), 1 / 9, np.float32)


def blurred(a: Any) -> Any:
    """The mean of each 3×3 window, zeros around."""
    p = np.pad(a, 1)
    return sum(p[i:i + N, j:j + N] for i in range(3) for j in range(3)) / 9


def softmax(a: Any) -> Any:
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# the view that a step reads in addition to the value itself: (function of a Tensor, function of an array)
VIEWS: dict[str, tuple[Step, Step]] = {
    "transpose": (lambda t: t.T, lambda a: a.T),
    "permute of three axes": (
        lambda t: t.reshape(2, 4, 8).permute(1, 2, 0).reshape(N, N),
        lambda a: a.reshape(2, 4, 8).transpose(1, 2, 0).reshape(N, N)),
    "reshape": (lambda t: t.reshape(4, 16).T.reshape(N, N), lambda a: a.reshape(4, 16).T.reshape(N, N)),
    "reshape to extents without a common divisor": (
        lambda t: t.reshape(64)[:63].reshape(9, 7).T.reshape(63).pad(((0, 1),)).reshape(N, N),
        lambda a: np.pad(a.reshape(64)[:63].reshape(9, 7).T.reshape(63), (0, 1)).reshape(N, N)),
    "flip": (lambda t: t.flip(0), lambda a: np.flip(a, 0)),
    "flip and transpose": (lambda t: t.flip(0).T, lambda a: np.flip(a, 0).T),
    "flip and reshape": (lambda t: t.reshape(4, 16).T.reshape(N, N).flip(1), lambda a: np.flip(a.reshape(4, 16).T.reshape(N, N), 1)),
    "roll": (lambda t: t.roll(1, 0), lambda a: np.roll(a, 1, 0)),
    "roll and transpose": (lambda t: t.roll(3, 1).T, lambda a: np.roll(a, 3, 1).T),
    "shift by pad and shrink": (
        lambda t: t.pad(((1, 0), (0, 0)), value=0.5)[:N],
        lambda a: np.pad(a, ((1, 0), (0, 0)), constant_values=0.5)[:N]),
    "shift there and back": (lambda t: t.pad(((1, 0), (0, 0)))[:N].pad(((0, 1), (0, 0)))[1:], lambda a: np.pad(a[:-1], ((0, 1), (0, 0)))),
    "expand and mean": (lambda t: t.reshape(N, N, 1).expand(N, N, 3).mean(-1), lambda a: a),
    "row": (lambda t: t[3:4].expand(N, N), lambda a: np.broadcast_to(a[3:4], (N, N))),
    "row as a column": (lambda t: t[3:4].expand(N, N).T, lambda a: np.broadcast_to(a[3:4], (N, N)).T),
    "mean of rows": (lambda t: t.mean(1, keepdim=True).expand(N, N), lambda a: np.broadcast_to(a.mean(1, keepdims=True), (N, N))),
    "mean of rows and transpose": (lambda t: t.T - t.mean(1, keepdim=True), lambda a: a.T - a.mean(1, keepdims=True)),
    "softmax and transpose": (lambda t: t.softmax(-1) + t.T, lambda a: softmax(a) + a.T),
    "slices and concatenation": (lambda t: Tensor.cat([t[4:], t[:4]]), lambda a: np.concatenate([a[4:], a[:4]])),
    "steps": (lambda t: Tensor.cat([t[::2], t[1::2]]).T, lambda a: np.concatenate([a[::2], a[1::2]]).T),
    "stack": (lambda t: Tensor.stack([t, t.T]).mean(0), lambda a: (a + a.T) / 2),
    "diagonal": (lambda t: t.diagonal().reshape(1, N).expand(N, N), lambda a: np.broadcast_to(a.diagonal(), (N, N))),
    "positions": (lambda t: t[Tensor(ORDER)], lambda a: a[ORDER]),
    "positions and transpose": (lambda t: t[Tensor(ORDER)].T, lambda a: a[ORDER].T),
    "average pool": (lambda t: t.reshape(1, 1, N, N).avg_pool2d(3, 1, 1).reshape(N, N).T, lambda a: blurred(a).T),
    "convolution": (lambda t: t.reshape(1, 1, N, N).conv2d(Tensor(BOX), padding=1).reshape(N, N), blurred),
    "windows": (lambda t: t.unfold(0, 2, 2).mean(-1).repeat_interleave(2, 0), lambda a: np.repeat(a.reshape(4, 2, N).mean(1), 2, 0)),
    "where": (lambda t: t.where(t.T > 0, t.T), lambda a: np.where(a.T > 0, a, a.T)),
    "maximum": (lambda t: t.maximum(t.T), lambda a: np.maximum(a, a.T)),
    "cumulative sum": (lambda t: t.cumsum(0) / N, lambda a: np.cumsum(a, 0) / N),
    "repeat": (lambda t: t[:4].repeat_interleave(2, 0), lambda a: np.repeat(a[:4], 2, 0)),
    "tile": (lambda t: t[:4].repeat(2, 1), lambda a: np.tile(a[:4], (2, 1))),
    "product": (lambda t: t.matmul(t.T) / (N + 8 * t.abs().max()), lambda a: a @ a.T / (N + 8 * np.abs(a).max())),
    "half": (lambda t: t.half().float().T, lambda a: a.T),
}


def check(step: Step, array_step: Step, start: Any = X, tolerance: float = 1e-5) -> None:
    """Check chains of steps (t + view(t)) / 2, or of `step`."""
    def run(length: int) -> None:
        t: Any = start() if callable(start) else Tensor(start)
        a = t.numpy()
        a = a if a.dtype == bool else a.astype(np.float64)
        for _ in range(length):
            t, a = step(t), array_step(a)
        if a.dtype == bool:
            np.testing.assert_array_equal(t.numpy(), a)
        else:
            np.testing.assert_allclose(t.numpy(), a, rtol=0, atol=tolerance * max(np.abs(a).max(), 1e-6))
    check_growth(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_a_value_and_a_view_of_it(name: str) -> None:
    view, array_view = VIEWS[name]
    tolerance = 1e-2 if name == "half" else 1e-5
    check(lambda t: (t + view(t)) * 0.5, lambda a: (a + array_view(a)) * 0.5, tolerance=tolerance)


NO_TWO_COMMUTE = ("transpose", "permute of three axes", "flip and transpose", "positions", "reshape to extents without a common divisor")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), list(zip(NO_TWO_COMMUTE, (*NO_TWO_COMMUTE[1:], NO_TWO_COMMUTE[0]), strict=True)))
def test_two_views_in_turn(first: str, second: str) -> None:
    """Views that do not commute: no two paths through the chain read the same element."""
    (f, g), (array_f, array_g) = zip(VIEWS[first], VIEWS[second], strict=True)
    check(lambda t: ((t + f(t)) + g(t + f(t))) * 0.25, lambda a: ((a + array_f(a)) + array_g(a + array_f(a))) * 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transpose", "reshape", "flip and transpose", "tile"])
def test_values_that_read_no_memory(name: str) -> None:
    view, array_view = VIEWS[name]
    check(lambda t: (t + view(t)) * 0.5, lambda a: (a + array_view(a)) * 0.5, lambda: Tensor.arange(N * N).reshape(N, N).float() * 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reshape to extents without a common divisor", "positions and transpose", "roll and transpose"])
def test_views_alone(name: str) -> None:
    """Index arithmetic that does not simplify occurs only once in the program."""
    check(*VIEWS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transpose", "flip and reshape", "tile"])
def test_conditions(name: str) -> None:
    """Chains of conditions over positions, and over what is read there."""
    view, array_view = VIEWS[name]

    def step(m: Any) -> Any:
        return (m & view(m)) ^ (view(m) | (m == m.T))

    def array_step(m: Any) -> Any:
        return (m & array_view(m)) ^ (array_view(m) | (m == m.T))
    for start in (lambda: Tensor(X) > 0, lambda: Tensor.arange(N).reshape(N, 1) * 3 < Tensor.arange(N) * 2 + 1):
        check(step, array_step, start)
