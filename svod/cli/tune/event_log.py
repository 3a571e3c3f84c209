"""The events of a search as JSON Lines (`svod-tune --log-json FILE`): one object per event, written when it happens.

    {"event": "round_finished", "at": 1760000000.25, "kernel": "9f3c…", "round": 3, "proposed": 41, "timed": 17, …}
    {"event": "fleet_sampled", "at": 1760000002.25, "kernel": "", "workers": [{"name": "local-bench-0", "state": "busy", …}], …}

`event` is the event's class (`svod.tune.search.events`), `at` is Unix time, the other entries are the event's fields. Times are seconds.
Unknown and infinite values are null. A command appends to the file; each of its sessions begins with `session_started`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from svod.cli.tune.waiting import say
from svod.system.process.streams import errors
from svod.tune.search.events import SearchEvent


def event_data(event: SearchEvent, at: float) -> dict[str, Any]:
    """An event as the JSON object of a line."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    fields = {f.name: _plain(getattr(event, f.name)) for f in dataclasses.fields(event)}
    return {"event": name, "at": at, **fields}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


class EventLog:
    """A file of events; "-" is stderr. A file that cannot be written is reported once, and the search goes on without it."""

    def __init__(self, path: str) -> None:
        self.path, self._file, self._broken = path, errors() if path == "-" else None, False

    def write(self, event: SearchEvent) -> None:
        if self._broken:
            return
        try:
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8")     # noqa: SIM115 - open until `close`
            self._file.write(json.dumps(event_data(event, time.time()), ensure_ascii=True, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as e:
            self._broken = True
            say(f"svod-tune: {self.path} cannot be written: {e.strerror or e}; the search goes on without it")

    def close(self) -> None:
        if self._file is not None and self.path != "-":
            with contextlib.suppress(OSError):      # `write` has reported the error
                self._file.close()
