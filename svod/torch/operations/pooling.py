"""Pooling."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from svod.core.ir.dtype import dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten


def _each(values: Sequence[int] | int, spatial: int) -> tuple[int, ...]:
    given = (values,) if isinstance(values, int) else tuple(values)
    return given * (spatial if len(given) == 1 else 1)


def _avg_pool(spatial: int, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
              ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:
    """Means of windows."""
    if divisor_override is not None:
        raise UnsupportedError("avg_pool with divisor_override")
    steps = _each(stride, spatial) if stride else None
    return getattr(x, f"avg_pool{spatial}d")(_each(kernel_size, spatial), steps, _each(padding, spatial), ceil_mode,    # type: ignore[no-any-return]
                                             count_include_pad)


def _max_pool(spatial: int, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
              dilation: Sequence[int] = (1,), ceil_mode: bool = False) -> tuple[Tensor, Callable[[], Tensor]]:
    """The largest of each window, and where it is in its image, counted row by row."""
    kernel, pads, spread = _each(kernel_size, spatial), _each(padding, spatial), _each(dilation, spatial)
    steps = _each(stride, spatial) if stride else kernel

    def positions() -> Tensor:
        if ceil_mode or 0 in x.shape:
            raise UnsupportedError("positions of max_pool with ceil_mode")
        windows = x._windows("max_pool", [(p, p) for p in pads], x.dtype.min, kernel, steps, spread)
        out = windows.shape[-2 * spatial:-spatial]
        best = windows.reshape(*windows.shape[:-spatial], -1).argmax(-1).cast(dtypes.int64)
        flat, left = Tensor.zeros(1, dtype=dtypes.int64), best
        scale = 1
        for i in reversed(range(spatial)):
            inside, left = left % kernel[i], left // kernel[i]
            begin = (Tensor.arange(out[i], dtype=dtypes.int64) * steps[i] - pads[i]).reshape(-1, *(1,) * (spatial - 1 - i))
            flat = flat + (begin + inside * spread[i]) * scale
            scale *= x.shape[x.ndim - spatial + i]
        return flat
    values = getattr(x, f"max_pool{spatial}d")(kernel, steps, pads, spread, ceil_mode)
    return values, positions


def _max_pool_alone(spatial: int, *args: Any, **kwargs: Any) -> Tensor:
    return _max_pool(spatial, *args, **kwargs)[0]


for _spatial in (1, 2, 3):
    aten(f"avg_pool{_spatial}d")(partial(_avg_pool, _spatial))
    aten(f"max_pool{_spatial}d_with_indices")(partial(_max_pool, _spatial))
    aten(f"max_pool{_spatial}d")(partial(_max_pool_alone, _spatial))
for _spatial in (2, 3):
    aten(f"_adaptive_avg_pool{_spatial}d")(lambda x, size, n=_spatial: x._adaptive_average("adaptive_avg_pool", n, tuple(size)))
aten("adaptive_avg_pool1d")(lambda x, size: x.adaptive_avg_pool1d(tuple(size)))
aten("adaptive_avg_pool2d")(lambda x, size: x.adaptive_avg_pool2d(tuple(size)))
