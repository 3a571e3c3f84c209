"""Compiled programs on disk, which a second start of a program loads instead of lowering and compiling.

An entry is one file, named by a digest of everything that determines the code (`ObjectKey`): kernel key, opt chain, and the build, which
is the target and the code generator. Finding it requires no lowering. Layout, little-endian:

    magic "svodobj1" | 16 bytes digest of the rest | u32 length of the JSON | JSON of the build, ProgramSpec and remarks | object bytes

Some entries have remarks alone: chains of the heuristic, predicted times, schedules of models.

A cache is a list of directories: objects are stored in the first and read from all. `svod-db bake` makes a directory that is shipped with a
model, and leaves the file `BAKED` in it; a process for whose build such a directory has no object says so once. So does one for which the
user named a directory that is missing or empty: it may have been meant for a baked one.

What the cache promises:

* An entry belongs to the code that made it: keys contain `generator_digest`, and a process whose files have changed since it imported them
  stores nothing.
* A wrong entry is never used: the digest covers every byte, and the JSON repeats the key. A damaged entry is removed and counts as a miss.
* Entries appear whole or not at all, even if several processes write at once: each is written to a temporary file, which is renamed.
* It never raises: if the directory is missing, read-only or full, entries are not stored, and the log says so once.
* Entries are readable by everyone whom the umask permits, and a read-only directory works too. Because an entry is code, it is loaded only
  if nobody but the user and root may write to its file or to a folder above it; the log says once why other entries are skipped.
* It stays below its size: the entries unused for longest go first. Reading an entry marks it as used.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from svod.compile.lower.program import Count, PhaseSpec, ProgramSpec
from svod.config import log_once
from svod.core.ir.dtype import BY_NAME
from svod.core.ir.launch import ONCE, LaunchDims
from svod.core.machine.target import KEY_FIELDS, parse_key, threads_of
from svod.system.process.trust import writers
from svod.system.source import generator_digest, is_known

log = logging.getLogger("svod.object_cache")

ENTRY_MAGIC = b"svodobj1"
ENTRY_HEADER = struct.Struct("<8s16sI")
BAKED = "baked.txt"     # the file that marks a directory as shipped with a model
DEFAULT_MAX_BYTES = 1 << 30
EVICT_TO = 0.8  # share of the limit that is left after eviction, so that not every store has to evict


@dataclass(frozen=True)
class Build:
    """The machine and the compiler of an object: target key, revision of svod's renderer, the compiler that it calls, and a digest of
    svod's own code. An object is used only by an equal build. For code that any number of threads may run, the target key lacks its last
    field, the number of threads; for data of every machine and compiler, the other fields than `code` are empty (`anywhere`)."""

    target: str
    revision: int
    compiler: str
    code: str = field(default_factory=generator_digest)

    @cached_property
    def parts(self) -> list[Any]:
        """The values of all fields."""
        return [getattr(self, f.name) for f in fields(self)]

    @property
    def anywhere(self) -> Build:
        """The build of data that depends on svod's code alone."""
        return Build("", 0, "", self.code)

    def differences(self, here: Build) -> list[str]:
        """Describe the differences from the build `here` in words; [] if objects of this build are used there."""
        if not self.target:
            here = here.anywhere
        theirs, ours = parse_key(self.target), parse_key(here.target)
        words = [f"{name} {_unshared(value, ours[name])}" for name, value in theirs.items() if ours.get(name, value) != value]
        if self.compiler != here.compiler:
            words.append(f"compiler {self.compiler}, here {here.compiler}")
        if (self.revision, self.code) != (here.revision, here.code):
            words.append("another version of svod")
        return words

    def distance(self, here: Build) -> tuple[int, ...]:
        """Measure how far this build is from `here`; smaller tuples are nearer. First the number of differences counts, then which they
        are: another version of svod or of the compiler is farther than another target, and in the target an earlier field than a later
        one; last the number of features that one of them lacks, and the difference of the threads."""
        if not self.target:
            here = here.anywhere
        theirs, ours = parse_key(self.target), parse_key(here.target)
        features = set(theirs.get("features", "").split(",")) ^ set(ours.get("features", "").split(","))
        return (len(self.differences(here)), (self.revision, self.code) != (here.revision, here.code), self.compiler != here.compiler,
                *(theirs.get(name, "") != ours.get(name, "") for name in KEY_FIELDS), len(features),
                abs((threads_of(self.target) or 0) - (threads_of(here.target) or 0)))


def _unshared(theirs: str, ours: str) -> str:
    """Describe two values of a field of target keys, without the elements that both have."""
    a, b = theirs.split(","), ours.split(",")
    return f"{','.join(x for x in a if x not in b) or 'less'}, here {','.join(x for x in b if x not in a) or 'less'}"


@dataclass(frozen=True)
class ObjectKey:
    """Everything that determines the code of an object. `kernel`: the kernel's key; `chain`: a digest of its chain."""

    kernel: str
    chain: str
    build: Build

    @cached_property
    def name(self) -> str:
        """The name of the entry, 32 hex digits."""
        text = json.dumps([self.kernel, self.chain, *self.build.parts], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def spec_to_json(spec: ProgramSpec) -> dict[str, Any]:
    """Convert a ProgramSpec to JSON-able data, from which `spec_from_json` makes an equal one."""
    return {
        "name": spec.name,
        "params": [[dtype.name, size] for dtype, size in spec.params],
        "outs": list(spec.outs),
        "temps": list(spec.temps),
        "phases": [[p.symbol, p.extent, p.threads, p.scratch_bytes, p.once,
                    [[[list(t) for t in c.terms], c.const, c.stride, c.most] for c in p.counts], p.block, p.shared_bytes, p.subgroup]
                   for p in spec.phases],
        "variables": list(spec.variables),
        "ins": list(spec.ins),
        "launch": None if spec.launch == ONCE else spec.launch.to_data(),
    }


def spec_from_json(data: dict[str, Any]) -> ProgramSpec:
    """Make the ProgramSpec from the output of `spec_to_json`. Raises ValueError for invalid data, since it comes from a file."""
    try:
        phases = tuple(PhaseSpec(str(symbol), int(extent), int(threads), int(scratch), bool(once), tuple(
            Count(tuple((str(name), int(k)) for name, k in terms), int(const), int(stride), int(most))
            for terms, const, stride, most in counts), int(block), int(shared), int(subgroup))
            for symbol, extent, threads, scratch, once, counts, block, shared, subgroup in data["phases"])
        return ProgramSpec(
            name=str(data["name"]),
            params=tuple((BY_NAME[dtype], int(size)) for dtype, size in data["params"]),
            outs=tuple(int(slot) for slot in data["outs"]),
            temps=tuple(int(size) for size in data["temps"]),
            phases=phases,
            variables=tuple(str(name) for name in data["variables"]),
            ins=tuple(int(slot) for slot in data.get("ins", ())),
            launch=ONCE if data.get("launch") is None else LaunchDims.from_data(data["launch"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the description of a program: {error!r}") from error


@dataclass(frozen=True)
class CachedObject:
    """An entry: the program's description, its machine code, and the writer's remarks (JSON-able, e.g. the digest of LINEAR)."""

    spec: ProgramSpec
    code: bytes
    remarks: dict[str, Any] = field(default_factory=dict)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def pack(key: ObjectKey, entry: CachedObject) -> bytes:
    """Return the bytes of an entry's file."""
    meta = json.dumps({"key": key.name, "build": key.build.parts, "spec": spec_to_json(entry.spec), "remarks": entry.remarks},
                      separators=(",", ":")).encode()
    length = struct.pack("<I", len(meta))
    return ENTRY_MAGIC + _digest(length + meta + entry.code) + length + meta + entry.code


def unpack(key: ObjectKey, raw: bytes) -> CachedObject:
    """Read the entry from a file's bytes. Raises ValueError if they are damaged, of another format, or of another key."""
    meta, code = _unpacked(raw)
    if meta.get("key") != key.name:
        raise ValueError(f"belongs to the key {meta.get('key')!r}")
    return CachedObject(spec_from_json(meta["spec"]), code, meta["remarks"])


def _unpacked(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON and the code of an entry. Raises ValueError if they are damaged or of another format."""
    if len(raw) < ENTRY_HEADER.size:
        raise ValueError(f"{len(raw)} bytes are too few for an entry")
    magic, digest, length = ENTRY_HEADER.unpack_from(raw)
    if magic != ENTRY_MAGIC:
        raise ValueError(f"begins with {magic!r}, not {ENTRY_MAGIC!r}")
    if _digest(raw[ENTRY_HEADER.size - 4:]) != digest:
        raise ValueError("the digest does not fit the content")
    meta = json.loads(raw[ENTRY_HEADER.size:ENTRY_HEADER.size + length])
    if not isinstance(meta, dict) or not isinstance(meta.get("spec"), dict) or not isinstance(meta.get("remarks"), dict):
        raise ValueError("lacks a description of the program")
    return meta, raw[ENTRY_HEADER.size + length:]


class Stored(NamedTuple):
    """The objects of one build in a directory: their number, and the bytes of their files. `writers`: who, besides the user and root, may
    change one of them, so that it is not loaded; "": nobody."""

    objects: int = 0
    bytes: int = 0
    writers: str = ""


def object_files(directory: Path) -> list[Path]:
    """The files of a directory's objects."""
    return sorted(directory.glob("??/*.obj"))


def stored_builds(directory: Path) -> dict[Build, Stored]:
    """Count the objects in a directory by build. Files that cannot be read, are damaged or name no build are left out."""
    found: dict[Build, Stored] = {}
    for path in object_files(directory):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            raw = path.read_bytes()
            target, revision, compiler, code = _unpacked(raw)[0]["build"]
            build = Build(str(target), int(revision), str(compiler), str(code))
            n, size, others = found.get(build, Stored())
            found[build] = Stored(n + 1, size + len(raw), others or writers(path.resolve()))
    return found


def nearest_first(found: Mapping[Build, Stored], here: Build) -> list[tuple[Build, Stored]]:
    """Order builds by their distances from `here`; equally near ones by their numbers of objects, largest first, then by their names."""
    return sorted(found.items(), key=lambda x: (x[0].distance(here), -x[1].objects, x[0].parts))


def _path(directory: Path, key: ObjectKey) -> Path:
    """Return the file of an entry; in two directory levels, because a directory of 100,000 files is slow on some systems."""
    return directory / key.name[:2] / f"{key.name}.obj"


def make_directory(path: Path) -> None:
    """Make a directory and its parents, which others may read, if the umask permits it, but not write."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(0o755, exist_ok=True)


class ObjectCache:
    """Objects in the first of `directories`, at most `max_bytes` in total; the others are only read. Without directories nothing is stored.
    `named`: whether the user named them.

    Usable from several threads and processes at once; the guarantees are in the module's docstring."""

    def __init__(self, *directories: Path, max_bytes: int = DEFAULT_MAX_BYTES, named: bool = False) -> None:
        self.directories, self.named = directories, named
        self.max_bytes = max_bytes
        self._size: int | None = None  # bytes in the first directory as last counted, plus this process's stores; None: not counted yet
        self._said: set[tuple[str, Path]] = set()
        self._stored: dict[Build, int] = {}     # entries that this process has stored, by build

    def path(self, key: ObjectKey) -> Path | None:
        """Return the file in which an entry is stored; None if none is."""
        return _path(self.directories[0], key) if self.directories else None

    def has(self, key: ObjectKey) -> bool:
        """Whether there is a file for an entry, which `get` may still refuse."""
        return any(os.path.exists(_path(directory, key)) for directory in self.directories)

    def get(self, key: ObjectKey) -> CachedObject | None:
        """Return the entry of a program, or None; then the log says which baked directories have no object of its build. A damaged entry is
        removed."""
        entry = self._find(key)
        if entry is None:
            for directory in self.directories:
                if os.path.exists(directory / BAKED):
                    self._say_unfit(directory, key.build)
        return entry

    def remarks(self, key: ObjectKey) -> dict[str, Any]:
        """Return the remarks of an entry, {} if there is none. A damaged entry is removed."""
        entry = self._find(key)
        return {} if entry is None else entry.remarks

    def _find(self, key: ObjectKey) -> CachedObject | None:
        """The entry of a key, or None; then the log says which directories that the user named have no objects."""
        entry = next((entry for directory in self.directories if (entry := self._read(directory, key)) is not None), None)
        if entry is None and self.named:
            for directory in self.directories:
                self._say_empty(directory)
        return entry

    def _read(self, directory: Path, key: ObjectKey) -> CachedObject | None:
        try:
            path = _path(directory, key).resolve(strict=True)
            with open(path, "rb") as file:
                refused = writers(path)
                raw = b"" if refused else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say("read", directory, error)
            return None
        if refused:
            self._say_refused(directory, refused)
            return None
        try:
            entry = unpack(key, raw)
        except ValueError as error:
            log.warning("removing the damaged object %s: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # in a read-only cache, entries cannot be marked as used
            os.utime(path)
        return entry

    def _say_unfit(self, directory: Path, here: Build) -> None:
        """Warn once if a baked directory has no object of the build `here`, by the nearest of the builds that it has."""
        if ("unfit", directory) in self._said:
            return
        own = self._stored if directory == self.directories[0] else {}
        shipped = {build: stored for build, stored in stored_builds(directory).items() if stored.objects > own.get(build, 0)}
        found, for_threads = nearest_first(shipped, here), threads_of(here.target) is not None
        alike = [build for build, _ in found if build.target and (threads_of(build.target) is not None) == for_threads]
        if not alike and found and not for_threads:
            return      # a program of one thread has no code for any number of them; its kernels tell whether they fit
        self._said.add(("unfit", directory))
        strange = "another version of svod, or damaged files" if object_files(directory) else "it is empty"
        unknown = "none of its objects is a kernel's" if found else strange
        nearest = alike[0].differences(here) if alike else [unknown]
        if nearest:
            log.warning("no object in %s fits this process (%s), which compiles its kernels; svod-db list --objects %s shows what they fit",
                        directory, "; ".join(nearest), directory)

    def _say_empty(self, directory: Path) -> None:
        """Log once that a named directory has no objects: as a warning, unless it is there to be filled."""
        if ("empty", directory) in self._said:
            return
        self._said.add(("empty", directory))
        if not os.path.exists(directory / BAKED) and next(directory.glob("??/*.obj"), None) is None:
            is_folder, exists = os.path.isdir(directory), os.path.exists(directory)
            filled = directory == self.directories[0] and (is_folder or not exists)
            found = "has no compiled objects" if is_folder else "is no directory" if exists else "does not exist"
            log_once(log, logging.INFO if is_folder and filled else logging.WARNING,
                     f"{directory}, which SVOD_OBJECT_CACHE or object_cache= names, {found}: kernels are compiled"
                     f"{', and kept there' * filled}")

    def put(self, key: ObjectKey, entry: CachedObject) -> bool:
        """Store an entry. Returns whether it could be stored."""
        path = self.path(key)
        raw = pack(key, entry)
        if path is None or len(raw) > self.max_bytes:
            return False
        if not is_known():
            self._say("kept", self.directories[0], "svod's files are not those that this process imported, or cannot be read")
            return False
        try:
            make_directory(path.parent)
            beside = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
            try:
                with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
                    file.write(raw)
                os.replace(beside, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise
            others = writers(path.resolve()) if not self._stored else ""
        except OSError as error:
            self._say("kept", self.directories[0], error)
            return False
        if others:
            self._say_refused(self.directories[0], others)
        self._stored[key.build] = self._stored.get(key.build, 0) + 1
        self._size = sum(size for _, size, _ in self._files()) if self._size is None else self._size + len(raw)
        if self._size > self.max_bytes:
            self.evict()
        return True

    def _say_refused(self, directory: Path, others: str) -> None:
        """Warn once that a directory's objects are not loaded. `others`: who may write there."""
        self._say("loaded", directory, f"{others}, and compiled objects are code: let only their user or root write there, or name another "
                                       "directory as SVOD_OBJECT_CACHE")

    def _say(self, what: str, directory: Path, why: object) -> None:
        if (what, directory) not in self._said:
            self._said.add((what, directory))
            log.warning("compiled objects are not %s in %s: %s", what, directory, why)

    def _files(self) -> list[tuple[float, int, Path]]:
        """List (last use, bytes, path) of every file of the first directory, including abandoned temporary files; files that vanish
        meanwhile are left out."""
        files: list[tuple[float, int, Path]] = []
        for path in (path for directory in self.directories[:1] for path in directory.glob("??/*")):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        return files

    def evict(self) -> int:
        """Remove the entries unused for longest until 80 % of the limit are used. Returns the number of bytes freed."""
        files = sorted(self._files())
        total = before = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.max_bytes * EVICT_TO:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        self._size = total
        return before - total
