"""Every operation of Tensor on 16-bit floats against the same operation in float64, rounded once.

Operands are of several magnitudes, so that squares, sums and products between the steps leave the range of the type. A result is at most
one unit in the last place away from the rounded one: float32 is not exact, so that values beside the middle of two may go to the other.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from svod.nn import GRUCell, LSTMCell, RNNCell
from svod.tensor import Tensor
from tests.draws import a_half, a_sixteenth
from tests.tensor.checking import evaluate
from tests.tensor.strategies import rounded_to_bfloat16

Operation = Callable[..., Any]
MAGNITUDES = {"float16": (1.0, 300.0, 40000.0, 1e-4), "bfloat16": (1.0, 300.0, 1e18, 1e-4)}
CONV = (2, 3, 5, 7), (4, 3, 3, 3), (4,)


class Case(NamedTuple):
    """An operation on operands of these shapes. `low`, `high`: a range of values instead of magnitudes. `most`: the largest magnitude.
    `ulps`, and `lost` times the magnitude: the largest error."""

    run: Operation
    shapes: tuple[tuple[int, ...], ...] = ((4, 6),)
    low: float | None = None
    high: float = 1.0
    most: float = np.inf
    ulps: float = 1.0
    lost: float = 0.0


def of(run: Operation, *shapes: tuple[int, ...], **bounds: float) -> Case:
    return Case(run, shapes or ((4, 6),), **bounds)


def plain(names: str, *shapes: tuple[int, ...], **bounds: float) -> dict[str, Case]:
    """Cases of methods whose only arguments are operands."""
    return {name: of(lambda x, *rest, n=name: getattr(x, n)(*rest), *shapes, **bounds) for name in names.split()}


TWO = ((4, 6), (4, 6))
AT = np.array([2, 0, 2])
PLACES = np.array([[0, 1, 1, 3, 2, 0], [1, 1, 1, 1, 1, 1], [3, 3, 0, 0, 2, 2]])
CLASSES = np.array([1, 0, 5, 2])
MASK = np.arange(24).reshape(4, 6) % 3 == 0

STEPS: dict[str, Case] = {
    **plain("cos sin tan tanh erf erfc exp exp2 expm1 sinh cosh asinh atan sigmoid logsigmoid silu gelu softplus hardsigmoid hardswish "
            "mish selu elu celu softsign sinc square deg2rad rad2deg reciprocal softmax log_softmax glu swiglu leaky_relu softshrink "
            "logsumexp mean sum var std prod nansum nanmean norm normalize"),
    **plain("log log2 log10 sqrt rsqrt", low=1e-4, high=60000),
    **plain("acos asin atanh", low=-1), **plain("log1p", low=-0.9, high=60000), **plain("acosh", low=1, high=300),
    **plain("logit", low=0.01),
    **plain("add sub mul div true_divide hypot atan2 logaddexp floor_divide remainder fmod pairwise_distance cosine_similarity mse_loss "
            "l1_loss huber_loss smooth_l1_loss isclose copysign", *TWO),
    **plain("lerp addcmul addcdiv", *TWO, (4, 6)), **plain("xlogy", *TWO, low=0.01, high=200),
    **plain("binary_cross_entropy", *TWO, low=0.01), **plain("binary_cross_entropy_with_logits kl_div", *TWO, low=0.01, high=4),
    **plain("matmul mm dot linear", (5, 7), (7, 7)), **plain("bmm", (2, 3, 5), (2, 5, 4)), **plain("tensordot", (3, 4, 5), (4, 5)),
    **plain("outer", (5,), (3,)), **plain("cdist", (3, 7), (5, 7)), **plain("addmm", (3, 4), (3, 7), (7, 4)), **plain("trace", (5, 5)),
    **plain("conv2d", *CONV), **plain("conv1d", (2, 3, 9), (4, 3, 3), (4,)), **plain("conv3d", (1, 2, 3, 4, 5), (3, 2, 2, 2, 2), (3,)),
    **plain("conv_transpose1d", (2, 3, 5), (3, 4, 3), (4,)), **plain("conv_transpose2d", (2, 3, 5, 4), (3, 4, 2, 3), (4,)),
    **plain("conv_transpose3d", (1, 2, 3, 2, 3), (2, 3, 2, 2, 2), (3,)),
    "inner": of(lambda x, y: x.inner(y), (3, 5), (2, 5)),
    # float32 can represent their product
    "einsum": of(lambda x, y, z: Tensor.einsum("ij,jk,k->i", x, y, z), (3, 4), (4, 5), (5,), most=1e6),
    "tanhshrink": of(lambda x: x.tanhshrink(), lost=2.0 ** -23),        # a difference of nearly equal numbers
    "pow": of(lambda x: (x.abs() ** 1.5, x ** 3, x ** -2, x.abs() ** 1.7, 1.1 ** x.clamp(-30, 30),
                      x.abs() ** 0.5, 2 ** x.clamp(-8, 8), x.abs() ** x.clamp(-2, 2))),
    "round": of(lambda x: (x.round(), x.round(1), x.round(-2))),
    "threshold": of(lambda x: x.threshold(0.25, -3.0)),
    "prelu": of(lambda x, w: x.prelu(w), (2, 3, 4), (3,)),
    "std_mean": of(lambda x: x.std_mean(1)), "var_mean": of(lambda x: x.var_mean(0)),
    "cumsum": of(lambda x: x.cumsum(1)), "cumprod": of(lambda x: x.cumprod(0)), "logcumsumexp": of(lambda x: x.logcumsumexp(1)),
    "diff": of(lambda x: x.diff(3)),
    "scatter": of(lambda x, y: tuple(x.scatter(0, PLACES, y, reduce=how) for how in (None, "add", "multiply")), *TWO),
    "scatter_add": of(lambda x, y: x.scatter_add(0, PLACES, y), *TWO),
    "scatter_reduce": of(lambda x, y: tuple(x.scatter_reduce(0, PLACES, y, how, include_self=own) for own in (True, False)
                                            for how in ("sum", "prod", "mean", "amax", "amin")), *TWO),
    "index_reduce": of(lambda x, y: tuple(x.index_reduce(0, AT, y, how, include_self=own) for own in (True, False)
                                          for how in ("prod", "mean", "amax", "amin")), (4, 6), (3, 6)),
    "index_add": of(lambda x, y: (x.index_add(0, AT, y), x.index_add(0, AT, y, alpha=-1.5)), (4, 6), (3, 6)),
    "layer_norm": of(lambda x, w, b: x.layer_norm(6, w, b), (4, 6), (6,), (6,)),
    "rms_norm": of(lambda x, w: x.rms_norm(6, w, 1e-5), (4, 6), (6,)),
    "group_norm": of(lambda x, w, b: x.group_norm(2, w, b), (2, 4, 5), (4,), (4,)),
    "instance_norm": of(lambda x, w: x.instance_norm(weight=w), (2, 4, 5), (4,)),
    "batch_norm": of(lambda x, m, v, w, b: x.batch_norm(m, v.abs(), w, b), (2, 4, 5), (4,), (4,), (4,), (4,)),
    "avg_pool1d": of(lambda x: x.avg_pool1d(3, 2, 1), (2, 3, 7)),
    "avg_pool2d": of(lambda x: (x.avg_pool2d(2), x.avg_pool2d(3, 2, 1, True, False)), (1, 2, 7, 6)),
    "avg_pool3d": of(lambda x: x.avg_pool3d(2), (1, 2, 4, 4, 3)),
    "adaptive_avg_pool1d": of(lambda x: x.adaptive_avg_pool1d(3), (2, 3, 7)),
    "adaptive_avg_pool2d": of(lambda x: (x.adaptive_avg_pool2d((2, 3)), x.adaptive_avg_pool2d((3, 4))), (1, 2, 6, 6)),
    "interpolate": of(lambda x: tuple(x.interpolate((5, 9), mode=m) for m in ("nearest", "bilinear", "bicubic", "area")), (1, 2, 4, 6)),
    "nll_loss": of(lambda x, w: x.nll_loss(CLASSES, w.abs()), (4, 6), (6,)),
    "cross_entropy": of(lambda x, w: (x.cross_entropy(CLASSES), x.cross_entropy(CLASSES, w.abs(), label_smoothing=0.1)), (4, 6), (6,)),
    "rotary_embedding": of(lambda x, c, s: (x.rotary_embedding(c, s), x.rotary_embedding(c, s, interleaved=True)),
                           (2, 4, 6), (4, 3), (4, 3)),
    "linspace": of(lambda x: Tensor.linspace(-3, 50000, 7, dtype=x.dtype)),
    "arange": of(lambda x: Tensor.arange(0.1, 5, 0.3, dtype=x.dtype)),
    # probabilities are rounded before their product with the values: the error is a share of the sum of magnitudes
    "scaled_dot_product_attention": of(lambda q, k, v: (q.scaled_dot_product_attention(k, v.abs()),
                                                        q.scaled_dot_product_attention(k, v.abs(), is_causal=True)),
                                       (2, 5, 8), (2, 5, 8), (2, 5, 4), ulps=2),
}
EXACT: dict[str, Case] = {
    **plain("abs amax amin aminmax all any argmax argmin argsort ceil clone contiguous count_nonzero detach dropout flatten floor frac "
            "hardshrink hardtanh isfinite isinf isnan isneginf isposinf logical_not max median min msort nan_to_num neg ones_like ravel "
            "relu relu6 sign signbit sort t trunc zeros_like"),
    **plain("eq ge gt le lt ne logical_and logical_or logical_xor maximum minimum heaviside expand_as reshape_as", *TWO),
    "broadcast_to": of(lambda x: x.broadcast_to((3, 4, 6))), "cat": of(lambda x, y: Tensor.cat([x, y], 1), *TWO),
    "chunk": of(lambda x: x.chunk(3, 1)), "clamp": of(lambda x: x.clamp(-0.5, 200)), "clip": of(lambda x: x.clip(-0.5, 200)),
    "clamp_min": of(lambda x: x.clamp_min(0.5)), "clamp_max": of(lambda x: x.clamp_max(0.5)),
    "cummax": of(lambda x: x.cummax(1)), "cummin": of(lambda x: x.cummin(0)), "diag": of(lambda x: x.diag(1)),
    "diag_embed": of(lambda x: x.diag_embed(1)), "diagonal": of(lambda x: x.diagonal(1)),
    "embedding": of(lambda x: Tensor(AT).embedding(x)), "expand": of(lambda x: x.expand(3, 4, 6)),
    "eye": of(lambda x: Tensor.eye(3, 4, x.dtype)),
    "flip": of(lambda x: x.flip(1)), "full": of(lambda x: Tensor.full((3,), 300.0, x.dtype)), "full_like": of(lambda x: x.full_like(0.5)),
    "gather": of(lambda x: x.gather(0, PLACES)), "hstack": of(lambda x, y: Tensor.hstack([x, y]), *TWO),
    "index_copy": of(lambda x, y: x.index_copy(0, AT, y), (4, 6), (3, 6)), "index_fill": of(lambda x: x.index_fill(0, AT, 0.5)),
    "index_select": of(lambda x: x.index_select(0, AT)), "kthvalue": of(lambda x: x.kthvalue(2)),
    "masked_fill": of(lambda x: x.masked_fill(MASK, 0.5)), "masked_scatter": of(lambda x, y: x.masked_scatter(MASK, y), *TWO),
    "masked_select": of(lambda x: x.masked_select(MASK, size=9)), "max_pool1d": of(lambda x: x.max_pool1d(3, 2, 1), (2, 3, 7)),
    "max_pool2d": of(lambda x: x.max_pool2d(2), (1, 2, 6, 5)), "max_pool3d": of(lambda x: x.max_pool3d(2), (1, 2, 4, 4, 3)),
    "meshgrid": of(lambda x, y: Tensor.meshgrid(x, y), (3,), (4,)), "movedim": of(lambda x: x.movedim(0, 1)),
    "narrow": of(lambda x: x.narrow(1, 2, 3)), "nonzero": of(lambda x: x.nonzero(size=30)),
    "ones": of(lambda x: Tensor.ones(3, dtype=x.dtype)),
    "pad": of(lambda x: (x.pad([(1, 0), (0, 2)]), x.pad((1, 1), mode="reflect"))), "permute": of(lambda x: x.permute(1, 0)),
    "pixel_shuffle": of(lambda x: x.pixel_shuffle(2), (1, 4, 2, 3)), "pixel_unshuffle": of(lambda x: x.pixel_unshuffle(2), (1, 1, 4, 6)),
    "repeat": of(lambda x: x.repeat(2, 1)), "repeat_interleave": of(lambda x: x.repeat_interleave(2, 1)),
    "reshape": of(lambda x: x.reshape(8, 3)),
    "roll": of(lambda x: x.roll(2, 1)), "shrink": of(lambda x: x.shrink([(1, 3), (0, 5)])), "split": of(lambda x: x.split(2, 1)),
    "squeeze": of(lambda x: x.squeeze(0), (1, 5)), "stack": of(lambda x, y: Tensor.stack([x, y]), *TWO),
    "swapaxes": of(lambda x: x.swapaxes(0, 1)), "take": of(lambda x: x.take(AT, 0)),
    "take_along_dim": of(lambda x: x.take_along_dim(PLACES, 0)),
    "tile": of(lambda x: x.tile(2, 1)), "topk": of(lambda x: x.topk(3)), "transpose": of(lambda x: x.transpose(0, 1)),
    "tril": of(lambda x: x.tril()),
    "triu": of(lambda x: x.triu()), "unbind": of(lambda x: x.unbind(0)), "unflatten": of(lambda x: x.unflatten(1, (2, 3))),
    "unfold": of(lambda x: x.unfold(1, 3, 2)), "unsqueeze": of(lambda x: x.unsqueeze(1)), "view": of(lambda x: x.view(3, 8)),
    "vstack": of(lambda x, y: Tensor.vstack([x, y]), *TWO), "where": of(lambda x, y: x.where(MASK, y), *TWO),
    "zeros": of(lambda x: Tensor.zeros(3, dtype=x.dtype)),
}
NO_OPERATION = {
    "of the tensor, not of its values": "device dim dtype element_size is_realized nbytes ndim numel shape size uop",
    "computes nothing, or computes at once": "T mT allclose assign cpu empty empty_like equal from_dlpack from_file from_numpy from_uop "
                                             "item numpy prepare prepare_batch realize realize_batch to tolist",
    "converts": "astype bfloat16 bitcast bool cast double float half int long type",
    "of integers alone": "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor one_hot randint",
    "float32 whatever it is given": "rotary_angles",
    "random: tested below": "manual_seed normal rand rand_like randn randn_like uniform",
}


def operands(case: Case, dtype: str, magnitude: float) -> list[np.ndarray[Any, Any]]:
    """Values that `dtype` represents, of both signs unless the case has a range."""
    rng = np.random.default_rng(len(case.shapes))
    made = []
    for shape in case.shapes:
        if case.low is None:
            values = rng.uniform(0.3, 1.0, shape) * rng.choice([-1.0, 1.0], shape) * magnitude
        else:
            values = rng.uniform(case.low, case.high, shape)
        made.append(halved(values, dtype).astype(np.float64))
    return made


def halved(values: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Round float64 values to a 16-bit float once, by rounding to odd in float32 first."""
    with np.errstate(all="ignore"):
        if dtype == "float16":
            return np.asarray(values, np.float64).astype(np.float16).astype(np.float32)
        exact = np.asarray(values, np.float64)
        near = exact.astype(np.float32)
        toward = np.nextafter(near, np.where(exact > near, np.float32(np.inf), np.float32(-np.inf)), dtype=np.float32)
        is_even = (near.view(np.int32) & 1) == 0
        return rounded_to_bfloat16(np.where(np.isfinite(near) & (exact != near) & is_even, toward, near))


def results(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [t for m in made for t in results(m)]


def compare(case: Case, dtype: str, magnitude: float) -> None:
    """Check that the operation in `dtype` gives its result in float64, rounded."""
    arrays = operands(case, dtype, magnitude)
    halves = results(case.run(*(Tensor(a, dtype=dtype) for a in arrays)))
    exact = results(case.run(*(Tensor(a) for a in arrays)))
    assert len(halves) == len(exact)
    for half, wide in zip(halves, exact, strict=True):
        wanted, got = evaluate(wide), evaluate(half).astype(np.float64)
        if not wide.dtype.is_float:
            assert half.dtype == wide.dtype
            np.testing.assert_array_equal(got, wanted)
            continue
        assert half.dtype.name == dtype
        check_rounded(got, wanted, dtype, case.ulps, case.lost * magnitude)


def check_rounded(got: Any, exact: Any, dtype: str, ulps: float, lost: float = 0.0) -> None:
    """Check that `got` is `exact` rounded to `dtype`, up to `ulps` units in the last place and `lost`. Values that underflow in float32,
    such as exp(-300), may be 0 in bfloat16, which has the same range."""
    wanted = halved(exact, dtype).astype(np.float64)
    bits, least = (10, -24) if dtype == "float16" else (7, -126)
    with np.errstate(all="ignore"):
        unit = 2.0 ** np.maximum(np.floor(np.log2(np.abs(wanted))) - bits, least)
        near = np.abs(got - wanted) <= ulps * unit + lost
    right = np.where(np.isfinite(wanted), near, (got == wanted) | (np.isnan(got) & np.isnan(wanted)))
    assert right.all(), (got[~right][:5], wanted[~right][:5], np.asarray(exact)[~right][:5])


def test_every_operation_is_in_the_table() -> None:
    others = {name for names in NO_OPERATION.values() for name in names.split()}
    public = {name for name in dir(Tensor) if not name.startswith("_")}
    assert public - others == STEPS.keys() | EXACT.keys()
    assert not STEPS.keys() & EXACT.keys() and not others & (STEPS.keys() | EXACT.keys())


@pytest.mark.parametrize(("name", "dtype"), a_sixteenth(product([*STEPS, *EXACT], MAGNITUDES)))
def test_an_operation_is_rounded_once(name: str, dtype: str) -> None:
    case = STEPS.get(name) or EXACT[name]
    for magnitude in MAGNITUDES[dtype] if case.low is None else (1.0,):
        if magnitude <= case.most:
            compare(case, dtype, magnitude)


@pytest.mark.parametrize("dtype", a_half(MAGNITUDES))
def test_random_numbers_are_scaled_before_they_are_rounded(dtype: str) -> None:
    for draw in (lambda kind: Tensor.normal(50, mean=40000.0, std=3.0, dtype=kind), lambda kind: Tensor.normal(50, std=1e-4, dtype=kind)):
        Tensor.manual_seed(3)
        exact = evaluate(draw("float32"))
        Tensor.manual_seed(3)
        check_rounded(evaluate(draw(dtype)).astype(np.float64), exact, dtype, 0)
    Tensor.manual_seed(3)
    units = evaluate(Tensor.rand(50, dtype=dtype)).astype(np.float64)
    Tensor.manual_seed(3)
    check_rounded(evaluate(Tensor.uniform(50, low=-1000.0, high=3.0, dtype=dtype)).astype(np.float64), units * 1003 - 1000, dtype, 0)


CELLS: dict[str, Any] = {"RNNCell": RNNCell, "GRUCell": GRUCell, "LSTMCell": LSTMCell}


@pytest.mark.parametrize("dtype", MAGNITUDES)
@pytest.mark.parametrize("name", a_half(CELLS))
def test_a_step_of_a_recurrent_network_is_rounded_once(name: str, dtype: str) -> None:
    """Products that exceed the range cancel before they are rounded; gates and states are not rounded in between."""
    cell = CELLS[name](3, 4)
    count = cell.weight_ih.shape[0]
    rng = np.random.default_rng(1)
    large = 300.0 if dtype == "float16" else 1e18
    weights = {"weight_ih": rng.normal(size=(count, 3)), "weight_hh": rng.normal(size=(count, 4)), "bias_ih": rng.normal(size=count),
               "bias_hh": rng.normal(size=count)}
    weights["weight_ih"][:, 1], weights["weight_ih"][:, 2] = large, -large
    x, states = rng.normal(size=(2, 3)), [rng.normal(size=(2, 4)) for _ in range(cell.states)]
    x[:, 0], x[:, 1], x[:, 2] = 0.0, large, large

    def run(kind: str) -> list[Tensor]:
        for key, value in weights.items():
            setattr(cell, key, Tensor(halved(value, dtype), dtype=kind))
        given = tuple(Tensor(halved(s, dtype), dtype=kind) for s in states)
        return results(cell(Tensor(halved(x, dtype), dtype=kind), given if cell.states > 1 else given[0]))
    for half, wide in zip(run(dtype), run("float64"), strict=True):
        assert half.dtype.name == dtype
        check_rounded(evaluate(half).astype(np.float64), evaluate(wide), dtype, 1)
