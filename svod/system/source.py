"""The identity of svod's own code in this process. Caches and workers compare it to find out whether they have the same code.

Modules are imported when they are first used, also hours after the start, and a package may be updated while a process runs. So svod
records its files' times, sizes and inodes at import. As long as these do not change, the running code is known to be the code in the files.
After a change it is unknown: this process no longer stores compiled code for others, nor works with processes that start from the new
files.
"""
from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

MODULES = tuple(importlib.machinery.all_suffixes())     # suffixes of modules: sources, bytecode without a source, compiled extensions
SUFFIXES = (*MODULES, ".ll", ".json")      # suffixes of modules, and of the data files that code generation reads
UNCHECKED_FLAG = 0b01    # flag bit of bytecode that is not compared with its source (PEP 552)
PYC_HEADER_BYTES = 16    # bytes before the code in a .pyc file: magic number, flags, time and size of the source


class SourceFiles:
    """The files of a package at `root`, as they are now: in a directory, in an archive, or in the file of a frozen program."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unknown = f"unknown {os.urandom(6).hex()}"   # different in each process, so that two processes with unknown code never match
        self._files = self._look()
        self._modules = 0       # number of loaded modules when the files were last compared
        self._digests: dict[tuple[str, ...], str] = {}

    def is_known(self) -> bool:
        """Whether the files have not changed since import, so that all modules loaded so far came from the recorded files."""
        if self._modules != len(sys.modules):
            modules = len(sys.modules)
            if not self._files or self._files != self._look():
                return False
            self._modules = modules
        return True

    def digest(self, *parts: str) -> str:
        """A digest (16 hex digits) of the given directories and files of the package, or of all of it. For an archive, `parts` are
        ignored. If the code is unknown, the digest begins with "unknown" and differs in each process."""
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
        inside = f"{self._root}{os.sep}"
        for path in sorted(self._files):
            name = path.removeprefix(inside).replace(os.sep, "/")
            if not path.startswith(inside):
                with open(path, "rb") as file:
                    h.update(hashlib.file_digest(file, "blake2b").digest())
            elif not parts or name in parts or name.startswith(tuple(f"{p}/" for p in parts)):
                raw = _executed(path)
                h.update(f"{name}\0{len(raw)}\0".encode())
                h.update(raw)
        return h.hexdigest()

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """Time, size and inode of the package's files, by path, or of the one archive or program that contains them; {} if none is
        found."""
        found: dict[str, tuple[int, int, int]] = {}
        try:
            if self._root.is_dir():
                _scan(str(self._root), found)
            if not any(path.endswith(MODULES) for path in found):
                holder = next((p for p in self._root.parents if p.exists()), self._root)
                if not holder.is_file():
                    from svod.system.process import program  # imported late: few processes need it
                    holder = Path(program.frozen_file() or holder)
                found = {str(holder): _stamp(os.stat(holder))} if holder.is_file() else {}
        except OSError:     # a file vanished meanwhile
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
    """The bytes that Python executes for a module's file: its source, or bytecode without the header, which has a time stamp."""
    if path.endswith(".py"):
        try:
            with open(importlib.util.cache_from_source(path), "rb", buffering=0) as file:
                header = file.read(PYC_HEADER_BYTES)
                if header[:4] == importlib.util.MAGIC_NUMBER and header[4] & 0b11 == UNCHECKED_FLAG:
                    return file.readall()
        except (OSError, NotImplementedError):
            pass
    with open(path, "rb", buffering=0) as file:
        raw = file.readall()
    return raw[PYC_HEADER_BYTES:] if path.endswith(".pyc") else raw


_SVOD = SourceFiles(Path(os.path.abspath(__file__)).parent.parent)
GENERATOR = ("core", "compile", "system", "config.py", "errors.py")     # the directories and files that generated code depends on


def source_digest() -> str:
    """A digest of all of svod's code (`SourceFiles.digest`)."""
    return _SVOD.digest()


def generator_digest() -> str:
    """A digest of the part of svod's code that generates code (`SourceFiles.digest`)."""
    return _SVOD.digest(*GENERATOR)


def is_known() -> bool:
    """Whether svod's code in this process is the code in its files: no file has changed since import."""
    return _SVOD.is_known()
