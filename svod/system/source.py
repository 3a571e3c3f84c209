"""A digest of svod's source, which tells whether a cached object or a worker's answer is out of date."""
from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def source_digest(*packages: str) -> str:
    """Digest, in 16 hex digits, of the source files of packages of svod ("core", "compile"), or of all, read from disk at the first
    call."""
    h = hashlib.blake2b(digest_size=8)
    for directory in [ROOT / p for p in packages] or [ROOT]:
        for path in sorted(p for p in directory.rglob("*") if p.suffix in (".py", ".ll")):
            raw = path.read_bytes()
            h.update(f"{path.relative_to(ROOT).as_posix()}\0{len(raw)}\0".encode())
            h.update(raw)
    return h.hexdigest()
