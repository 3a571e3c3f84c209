"""The arg of a PARAM node: an argument of a kernel."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """The arg of a PARAM: a flat buffer of `size` elements passed as argument `slot`.

    `constant` marks a weight of the plan, which root stages may pack once. `vmin`/`vmax` bound the
    integers it holds, where known (indices of a gather), so that test inputs can be drawn inside them."""

    slot: int
    size: int
    constant: bool = False
    vmin: int | None = None
    vmax: int | None = None
