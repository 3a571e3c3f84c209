"""Convolutions and resizing of images."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten, own


@aten("convolution")
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
                transposed: bool, output_padding: Sequence[int], groups: int) -> Tensor:
    """The convolution, or transposed convolution, of (N, C, …) over one to three spatial axes."""
    spatial = weight.ndim - 2
    if not 1 <= spatial <= 3:
        raise UnsupportedError(f"convolution over {spatial} axes")

    def each(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) * (spatial if len(values) == 1 else 1)
    if transposed:
        function = getattr(x, f"conv_transpose{spatial}d")
        return function(weight, bias, each(stride), each(padding), each(output_padding), groups, each(dilation))    # type: ignore[no-any-return]
    return getattr(x, f"conv{spatial}d")(weight, bias, each(stride), each(padding), each(dilation), groups)     # type: ignore[no-any-return]


Scales = Sequence[float] | float | None


def _resize(mode: str, spatial: int, corners: bool) -> Callable[..., Tensor]:
    """The implementation of an upsample operation, called as (x, size, [align_corners], scales…) or (x, size, [align_corners], list of
    scales)."""
    def resize(x: Tensor, size: Sequence[int] | None, *rest: Scales) -> Tensor:
        if corners and not x.dtype.is_float:
            raise UnsupportedError(f"resizing {x.dtype.name} by {mode}")
        align = bool(rest[0]) if corners else None
        given = rest[1:] if corners else rest
        scales = list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else [s for s in given if s is not None]
        if len(scales) == spatial and (size is None or _sizes(x, scales) == tuple(size)):
            return x.interpolate(scale_factor=[float(s) for s in scales], mode=mode, align_corners=align)   # type: ignore[arg-type]
        assert size is not None
        return x.interpolate(tuple(size), mode=mode, align_corners=align)
    return resize


@own("interpolate")
def interpolate(x: Tensor, size: Sequence[int] | None, scales: Sequence[float] | None, mode: str, corners: bool) -> Tensor:
    return _resize(mode, x.ndim - 2, True)(x, size, corners, scales)


def _sizes(x: Tensor, scales: Sequence[Scales]) -> tuple[int, ...]:
    return tuple([int(n * float(s)) for n, s in zip(x.shape[2:], scales, strict=True)])     # type: ignore[arg-type]


for _spatial in (1, 2, 3):
    for _form in ("", ".vec"):
        aten(f"upsample_nearest{_spatial}d{_form}", widens=False)(_resize("nearest", _spatial, False))
        aten(f"_upsample_nearest_exact{_spatial}d{_form}", widens=False)(_resize("nearest-exact", _spatial, False))
for _form in ("", ".vec"):
    aten(f"upsample_linear1d{_form}")(_resize("linear", 1, True))
    aten(f"upsample_bilinear2d{_form}")(_resize("bilinear", 2, True))
    aten(f"upsample_trilinear3d{_form}")(_resize("trilinear", 3, True))
    aten(f"upsample_bicubic2d{_form}")(_resize("bicubic", 2, True))
