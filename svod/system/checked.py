"""Converts plain data from outside to values of declared types."""
from __future__ import annotations

from typing import Any

import msgspec

from svod.errors import SvodError


def checked(value: object, kind: Any, error: type[SvodError], where: str = "") -> Any:
    """Convert JSON data to a `kind`: a dataclass, a NamedTuple, an annotated number, or a container of these. Unknown fields are
    ignored. Raises `error`, whose message gives the position in the value, if something does not fit."""
    try:
        return msgspec.convert(value, kind)
    # OverflowError: an integer of 400 digits fits no float
    except (msgspec.ValidationError, OverflowError, RecursionError, UnicodeError) as e:
        raise error(f"{where}{': ' * bool(where)}{e}") from None
