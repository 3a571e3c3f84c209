"""The arg of a PARAM node: an argument of a kernel."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """The arg of a PARAM: a flat buffer of `size` elements passed as argument `slot`.

    `constant`: whether it is a weight of the plan, whose rearranged copy may be made once and kept. `vmin`, `vmax`: bounds of the integers
    in the buffer if they are known (indices of a gather), within which test inputs are drawn; None otherwise."""

    slot: int
    size: int
    constant: bool = False
    vmin: int | None = None
    vmax: int | None = None
