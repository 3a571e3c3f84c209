"""Converts plain data from outside to values of declared types."""
from __future__ import annotations

from typing import Any

import msgspec

from svod.errors import SvodError


def checked(value: object, kind: Any, error: type[SvodError], where: str = "") -> Any:
    """Convert JSON data to a `kind`: a dataclass, a NamedTuple, an annotated number, or a container of these. Unknown fields are ignored.
    Raises `error`, with the place within the value, where something does not fit."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError, UnicodeError) as e:     # 400 digits fit no float
        raise error(f"{where}{': ' * bool(where)}{e}") from None
