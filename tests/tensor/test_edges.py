"""Difficult operands: quotients that float32 cannot represent, numbers out of a tensor's integer range, and floats, extents of -1."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from svod.config import PrepareConfig
from svod.core.ir.dtype import dtypes
from svod.errors import DTypeError, ShapeError, SvodError, TensorIndexError
from svod.tensor import Tensor
from tests.draws import a_half


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_remainders_of_floats_are_exact(dtype: str) -> None:
    rng = np.random.default_rng(3)
    largest = 1e7 if dtype == "float32" else 6e4
    x = np.concatenate([rng.uniform(-largest, largest, 331), rng.uniform(-3, 3, 61), [0.0, largest]]).astype(dtype)
    for y in (2 * math.pi, 0.1, -3.0, 1e-3):
        divisor = np.full(x.shape, y, dtype)
        a, b = Tensor(x), Tensor(divisor)
        assert np.array_equal((a % b).numpy(), np.remainder(x, divisor))
        assert np.array_equal(a.fmod(b).numpy(), np.fmod(x, divisor))
        floor = np.floor(x.astype(np.float64) / divisor.astype(np.float64))     # NumPy takes the floor of a quotient rounded to float32
        with np.errstate(over="ignore"):
            assert np.array_equal((a // b).numpy(), floor.astype(dtype))
    ends = Tensor(np.array([math.inf, 5.0, -5.0, 5.0, 0.0], dtype)) % Tensor(np.array([3.0, math.inf, math.inf, 0.0, 0.0], dtype))
    assert np.array_equal(ends.numpy(), np.array([math.nan, 5.0, math.inf, math.nan, math.nan], dtype), equal_nan=True)


@pytest.mark.parametrize("number", a_half([-1, 300, -40000, 2 ** 31, -2 ** 63 - 1, 10 ** 30]))
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_integers_are_compared_with_numbers_that_they_cannot_hold(dtype: str, number: int) -> None:
    x = np.array([np.iinfo(dtype).min, 0, 7, np.iinfo(dtype).max], dtype)
    t, values = Tensor(x), x.tolist()
    assert (t < number).tolist() == [v < number for v in values] and (t <= number).tolist() == [v <= number for v in values]
    assert (t > number).tolist() == [v > number for v in values] and (t >= number).tolist() == [v >= number for v in values]
    assert (t == number).tolist() == [v == number for v in values] and (t != number).tolist() == [v != number for v in values]


def test_16_bit_mixtures_are_rounded_once() -> None:
    rng = np.random.default_rng(5)
    x, y, z = (rng.uniform(0.5, 2, 77).astype(np.float16) for _ in range(3))
    a, b, c = Tensor(x), Tensor(y), Tensor(z)
    wide = [v.astype(np.float32) for v in (x, y, z)]
    expected = {"addcmul": (wide[0] + 3 * (wide[1] * wide[2]), a.addcmul(b, c, value=3)),
                "addcdiv": (wide[0] - wide[1] / wide[2], a.addcdiv(b, c, value=-1)),
                "lerp": (wide[0] + np.float32(0.25) * (wide[1] - wide[0]), a.lerp(b, 0.25))}
    for name, (values, found) in expected.items():
        assert found.dtype == dtypes.float16 and np.array_equal(found.numpy(), values.astype(np.float16)), name


@pytest.mark.parametrize("dtype, value, expected", [("bool", 3, True), ("int32", 2.75, 2), ("uint8", True, 1), ("float16", 2, 2.0)])
def test_what_is_filled_in_takes_the_dtype_of_the_tensor(dtype: str, value: float, expected: float) -> None:
    t = Tensor(np.zeros((3, 5), dtype))
    for filled in (t.masked_fill(np.arange(5) == 2, value), t.index_fill(1, Tensor([2]), value)):
        assert filled.dtype.name == dtype
        assert np.array_equal(filled.numpy(), np.where(np.arange(5) == 2, expected, np.zeros((3, 5))).astype(dtype))
    with pytest.raises(DTypeError, match="does not fit uint8"):
        Tensor([1, 2]).cast("uint8").masked_fill([True, False], 300)


def test_rms_norm_adds_what_the_dtype_can_tell() -> None:
    x = np.random.default_rng(7).standard_normal((3, 13)) * 1e-6
    expected = x / np.sqrt((x ** 2).mean(-1, keepdims=True) + np.finfo(np.float64).eps)
    assert np.allclose(Tensor(x).rms_norm(13).numpy(), expected, rtol=1e-13)


def test_masks_behind_an_ellipsis() -> None:
    x = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    last, two = np.arange(5) % 2 == 0, np.arange(15).reshape(3, 5) % 4 == 1
    t = Tensor(x)
    assert np.array_equal(t[..., last].numpy(), x[..., last])
    assert np.array_equal(t[..., two].numpy(), x[..., two])
    assert np.array_equal(t[..., last, None].numpy(), x[..., last, None])
    assert np.array_equal(t[..., np.array([True, False, True]), 1:].numpy(), x[..., np.array([True, False, True]), 1:])
    with pytest.raises(TensorIndexError, match="extents must agree"):
        t[..., np.array([True, False])]


@pytest.mark.parametrize("make", [
    lambda t: t.broadcast_to((-1,)), lambda t: t.expand(-1, 1), lambda t: Tensor(1.0).expand(-1), lambda t: t.repeat_interleave(-1, 0),
    lambda t: Tensor(1.0).flatten(0, 1), lambda t: Tensor(1.0).diag_embed()])
def test_extents_and_axes_that_are_not_there(make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ShapeError) as caught:
        make(Tensor([1.0]))
    assert isinstance(caught.value, SvodError)


def test_an_axis_without_elements_has_as_many_chunks_as_asked_for() -> None:
    assert [part.shape for part in Tensor.zeros(0, 3).chunk(2, 0)] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("given", ["float16", "float32", "float64"])
@pytest.mark.parametrize("to", a_half(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]))
def test_floats_beyond_an_integer_type_wrap(given: str, to: str) -> None:
    """Floats out of an integer type's range wrap as in NumPy, in vectors, in scalar remainders, and in the reference."""
    values = np.resize([-2.5, -1.0, -0.5, 0.5, 127.9, 128.0, 255.0, 256.5, -129.0, 40000.0, -40000.0, 65536.0, 2.0**31 - 128, -2.0**31], 67)
    with np.errstate(over="ignore"):
        x = values.astype(given)[np.isfinite(values.astype(given))]
    wanted = x.astype(np.int64).astype(to)
    np.testing.assert_array_equal(Tensor(x).cast(to).numpy(), wanted)
    np.testing.assert_array_equal(Tensor(x).cast(to).realize(PrepareConfig(device="CPU:interpreter", db=":none:")).numpy(), wanted)
