"""Which svod this is, by its source: what makes a cached object or a worker's answer out of date."""
from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def source_digest(*packages: str) -> str:
    """Digest of the source files of some packages of svod ("core", "compile"), or of all of it, as they are on disk at the first call:
    16 hex digits."""
    h = hashlib.blake2b(digest_size=8)
    for directory in [ROOT / p for p in packages] or [ROOT]:
        for path in sorted(p for p in directory.rglob("*") if p.suffix in (".py", ".ll")):
            raw = path.read_bytes()
            h.update(f"{path.relative_to(ROOT).as_posix()}\0{len(raw)}\0".encode())
            h.update(raw)
    return h.hexdigest()
