"""Plain data from outside as values of declared types."""
from __future__ import annotations

from typing import Any

import msgspec

from svod.errors import SvodError


def checked(value: object, kind: Any, error: type[SvodError], where: str = "") -> Any:
    """`value`, as JSON gives it, as a `kind`: a dataclass, NamedTuple, annotated number, or containers of these. Fields that the type
    does not have are ignored. Raises `error`, with the place within the value, where something does not fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise error(f"{where}{': ' * bool(where)}{e}") from None
