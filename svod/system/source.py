"""The identity of svod's own code in this process, by which caches and workers tell whether they belong to it.

Modules are imported when they are first used, also hours after the start, and a package may be updated under a running process. So its
files are looked at when svod is imported, and are known to be the code that runs as long as they are the same files. Afterwards nothing is
known: neither is what this process compiles kept for others, nor does it work with processes that start from the new files.
"""
from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

MODULES = tuple(importlib.machinery.all_suffixes())     # suffixes of modules: sources, bytecode without a source, compiled extensions
SUFFIXES = (*MODULES, ".ll", ".json")      # and the data that code is made of
UNCHECKED = 0b01    # flags of bytecode that is not compared with its source (PEP 552)
HEADER = 16         # bytes before the code: magic number, flags, time and size of the source


class Source:
    """The files of a package at `root`, as they are now: in a directory, in an archive, or in the file of a frozen program."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unknown = f"unknown {os.urandom(6).hex()}"   # different in each process: none may take another's unknown code for its own
        self._files = self._look()
        self._modules = 0       # modules that were loaded when the files were last compared
        self._digests: dict[tuple[str, ...], str] = {}

    def is_known(self) -> bool:
        """Whether everything that is loaded by now was loaded from files that have not changed since."""
        if self._modules != len(sys.modules):
            modules = len(sys.modules)
            if not self._files or self._files != self._look():
                return False
            self._modules = modules
        return True

    def digest(self, *parts: str) -> str:
        """A digest, in 16 hex digits, of some directories and files of the package, or of all; without them of an archive. Where the code
        is not known it begins with "unknown" and is another one in each process."""
        if parts not in self._digests:
            self._modules = 0
            try:
                found = self._hash(parts)
            except OSError:
                found = self._unknown
            self._digests[parts] = found if self.is_known() else self._unknown
        return self._digests[parts]

    def _hash(self, parts: tuple[str, ...]) -> str:
        h = hashlib.blake2b(digest_size=8)
        for path in sorted(self._files):
            name = os.path.relpath(path, self._root).replace(os.sep, "/")
            if name.startswith(".."):
                with open(path, "rb") as file:
                    h.update(hashlib.file_digest(file, "blake2b").digest())
            elif not parts or name in parts or name.startswith(tuple(f"{p}/" for p in parts)):
                raw = _executed(path)
                h.update(f"{name}\0{len(raw)}\0".encode())
                h.update(raw)
        return h.hexdigest()

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """Time, size and inode by path: of the package's files, or of the one file that holds them all; {} where that is not known."""
        found: dict[str, tuple[int, int, int]] = {}
        try:
            if self._root.is_dir():
                _scan(str(self._root), found)
            if not any(path.endswith(MODULES) for path in found):
                holder = next((p for p in self._root.parents if p.exists()), self._root)
                if not holder.is_file():
                    from svod.system.process import program  # Few starts need it.
                    holder = Path(program.frozen_file() or holder)
                found = {str(holder): _stamp(os.stat(holder))} if holder.is_file() else {}
        except OSError:     # a file that vanishes meanwhile
            return {}
        return found


def _stamp(s: os.stat_result) -> tuple[int, int, int]:
    return s.st_mtime_ns, s.st_size, s.st_ino


def _scan(directory: str, found: dict[str, tuple[int, int, int]]) -> None:
    with os.scandir(directory) as entries:
        for e in entries:
            if e.is_dir():
                if e.name != "__pycache__":
                    _scan(e.path, found)
            elif e.name.endswith(SUFFIXES):
                found[e.path] = _stamp(e.stat())


def _executed(path: str) -> bytes:
    """The bytes that Python executes for a module's file: a source, or bytecode, which says when it was made before it begins."""
    if path.endswith(".py"):
        try:
            compiled = Path(importlib.util.cache_from_source(path)).read_bytes()
        except (OSError, NotImplementedError):
            compiled = b""
        if compiled[:4] == importlib.util.MAGIC_NUMBER and compiled[4] & 0b11 == UNCHECKED:
            return compiled[HEADER:]
    raw = Path(path).read_bytes()
    return raw[HEADER:] if path.endswith(".pyc") else raw


_SVOD = Source(Path(os.path.abspath(__file__)).parent.parent)
GENERATOR = ("core", "compile", "system", "config.py", "errors.py")     # the parts on which generated code depends


def source_digest() -> str:
    """A digest of all of svod's code (`Source.digest`)."""
    return _SVOD.digest()


def generator_digest() -> str:
    """A digest of the part of svod's code that generates code (`Source.digest`)."""
    return _SVOD.digest(*GENERATOR)


def is_known() -> bool:
    """Whether svod's code in this process is the code in its files, as it was when it was imported."""
    return _SVOD.is_known()
