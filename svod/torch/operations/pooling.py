"""Pooling operations."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten


def _each(values: Sequence[int] | int, spatial: int) -> tuple[int, ...]:
    given = (values,) if isinstance(values, int) else tuple(values)
    return given * (spatial if len(given) == 1 else 1)


def _avg_pool(spatial: int, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
              ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:
    """The mean of each window."""
    if divisor_override is not None:
        raise UnsupportedError("avg_pool with divisor_override")
    steps = _each(stride, spatial) if stride else None
    return getattr(x, f"avg_pool{spatial}d")(_each(kernel_size, spatial), steps, _each(padding, spatial), ceil_mode,    # type: ignore[no-any-return]
                                             count_include_pad)


def _max_pool(spatial: int, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
              dilation: Sequence[int] = (1,), ceil_mode: bool = False) -> tuple[Tensor, Callable[[], Tensor]]:
    """The largest element of each window, and its position in the image, counted row by row."""
    kernel, pads, spread = _each(kernel_size, spatial), _each(padding, spatial), _each(dilation, spatial)
    steps = _each(stride, spatial) if stride else kernel
    name = f"max_pool{spatial}d"

    def positions() -> Tensor:
        if 0 in x.shape:
            raise UnsupportedError(f"positions of {name} without elements")
        *_, extra = x._pool_geometry(name, spatial, kernel, steps, pads, spread, ceil_mode)
        sides = [(p, p + e) for p, e in zip(pads, extra, strict=True)]
        first, *others = x._places_of_largest(name, sides, kernel, steps, spread)
        for place, size in zip(others, x.shape[x.ndim - spatial + 1:], strict=True):
            first = first * size + place
        return first
    return getattr(x, name)(kernel, steps, pads, spread, ceil_mode), positions


def _max_pool_alone(spatial: int, *args: Any, **kwargs: Any) -> Tensor:
    return _max_pool(spatial, *args, **kwargs)[0]


for _spatial in (1, 2, 3):
    aten(f"avg_pool{_spatial}d")(partial(_avg_pool, _spatial))
    aten(f"max_pool{_spatial}d_with_indices", widens=False)(partial(_max_pool, _spatial))
    aten(f"max_pool{_spatial}d", widens=False)(partial(_max_pool_alone, _spatial))
for _spatial in (2, 3):
    aten(f"_adaptive_avg_pool{_spatial}d")(lambda x, size, n=_spatial: x._adaptive_average("adaptive_avg_pool", n, tuple(size)))
aten("adaptive_avg_pool1d")(lambda x, size: x.adaptive_avg_pool1d(tuple(size)))
aten("adaptive_avg_pool2d")(lambda x, size: x.adaptive_avg_pool2d(tuple(size)))
