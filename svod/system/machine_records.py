"""Stores measured properties of this machine in a JSON file, by key.

Lost or damaged records can be measured again, so these functions log errors and raise none. The file is replaced atomically. If two
processes write at once, the later one may drop the record that the other one added.
"""
from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from svod.system.files import write_text

log = logging.getLogger("svod.records")


def read_records(path: Path) -> dict[str, Any]:
    """All records of the file; {} if it is missing, unreadable or not a JSON object."""
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        log.debug("no figures at %s yet", path)
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the figures in %s cannot be read (%s); they are measured again", path, error)
        return {}
    return loaded if isinstance(loaded, dict) else {}


def add_record(path: Path, key: str, value: Any) -> bool:
    """Add or replace a record and create the directory. `value` must fit JSON. Returns whether the file was written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(read_records(path) | {key: value}, indent=1))
    except OSError as error:
        log.warning("figures cannot be written to %s: %s", path, error)
        return False
    return True
