"""The object cache: round trips, damaged files of every kind, several writers, limits, and unusable directories."""
from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import random
import stat
import struct
from dataclasses import MISSING
from pathlib import Path

import pytest

from svod.compile.lower.program import Count, PhaseSpec, ProgramSpec
from svod.compile.plan import object_cache
from svod.compile.plan.object_cache import (
    BAKED,
    ENTRY_MAGIC,
    Build,
    CachedObject,
    ObjectCache,
    ObjectKey,
    Stored,
    nearest_first,
    pack,
    spec_from_json,
    spec_to_json,
    stored_builds,
    unpack,
)
from svod.core.ir.dtype import STORABLE, dtypes
from svod.core.ir.launch import ONE, LaunchDims
from svod.core.ir.uop import UOp

SPEC = ProgramSpec("gemm", tuple((d, 7 + k) for k, d in enumerate(STORABLE)), (0, 2), (64, 4096),
                   (PhaseSpec("gemm_0", 16, 2, 65536), PhaseSpec("gemm_1", 1, 1, 0, True, (Count((("n", 3),), 2, 4, 8),), 128, 4096, 32)),
               ("n", "start"), (1,), LaunchDims((ONE, UOp.const(dtypes.index, 4), ONE), (ONE, ONE, ONE)))
ENTRY = CachedObject(SPEC, bytes(range(256)) * 5, {"linear": "ab" * 16})
HERE = Build("x86_64/znver5/avx2,fma/l1 48k/l2 1m/l3 32m/t2", 1, "llvm 1")
KEY = ObjectKey("k" * 32, "c" * 32, HERE)


def test_a_program_description_survives_json() -> None:
    for record in (SPEC, SPEC.phases[1]):
        kept = [f.name for f in dataclasses.fields(record) if f.default is not MISSING and getattr(record, f.name) == f.default]
        assert not kept, f"a field that has its default says nothing: {kept}"
    assert spec_from_json(json.loads(json.dumps(spec_to_json(SPEC)))) == SPEC
    for broken in ({}, {**spec_to_json(SPEC), "params": [["float31", 1]]}, {**spec_to_json(SPEC), "phases": [["a", 1]]},
                   {**spec_to_json(SPEC), "outs": None}):
        with pytest.raises(ValueError):
            spec_from_json(broken)


def test_every_part_of_the_key_counts() -> None:
    builds = [HERE, dataclasses.replace(HERE, target="2"), dataclasses.replace(HERE, revision=2), dataclasses.replace(HERE, compiler="2"),
              dataclasses.replace(HERE, code="2")]
    assert len(builds) == 1 + len(dataclasses.fields(HERE))
    names = [ObjectKey(*parts).name for parts in (*(("kernel", "chain", b) for b in builds), ("kernel2", "chain", HERE),
                                                  ("kernel", "chain2", HERE), ("kernelchain", "", HERE))]
    assert len(set(names)) == len(names) == 8
    assert ObjectKey("kernel", "chain", Build(*dataclasses.astuple(HERE))).name == names[0] and len(names[0]) == 32


def test_a_process_whose_files_have_changed_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(object_cache, "is_known", lambda: False)
    cache = ObjectCache(tmp_path)
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert not cache.put(KEY, ENTRY) and not cache.put(KEY, ENTRY)
    assert caplog.text.count(f"not kept in {tmp_path}") == 1 and not list(tmp_path.iterdir())


def test_round_trip_across_instances(tmp_path: Path) -> None:
    assert ObjectCache(tmp_path).get(KEY) is None
    assert ObjectCache(tmp_path).put(KEY, ENTRY)
    assert ObjectCache(tmp_path).get(KEY) == ENTRY
    assert ObjectCache(tmp_path).get(ObjectKey("other", "", HERE)) is None
    assert ObjectCache(tmp_path).put(KEY, CachedObject(SPEC, b"new"))
    found = ObjectCache(tmp_path).get(KEY)
    assert found is not None and found.code == b"new" and found.remarks == {}


def test_damage_is_a_miss_and_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ObjectCache(tmp_path)
    path = cache.path(KEY)
    assert path is not None
    whole = pack(KEY, ENTRY)
    flipped = [whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1:] for k in (0, 7, 8, 23, 24, 27, 28, 60, len(whole) - 1)]
    damaged = [b"", whole[:5], whole[:28], whole[:-1], whole + b"x", *flipped, pack(ObjectKey("another", "", HERE), ENTRY)]
    for raw in damaged:
        assert cache.put(KEY, ENTRY)
        path.write_bytes(raw)
        with caplog.at_level(logging.WARNING, "svod.object_cache"):
            assert cache.get(KEY) is None
        assert not path.exists() and "damaged" in caplog.text
    assert unpack(KEY, whole) == ENTRY


def test_a_digest_that_fits_does_not_excuse_wrong_content(tmp_path: Path) -> None:
    """A complete file with a valid digest but invalid content, as another program could write it, is not used."""
    spec = spec_to_json(SPEC)
    name = KEY.name
    metas: list[object] = [[], {}, {"key": name}, {"key": name, "spec": [], "remarks": {}}, {"key": name, "spec": spec, "remarks": 1},
                 {"key": name, "spec": {**spec, "phases": [1]}, "remarks": {}}, {"key": "other", "spec": spec, "remarks": {}}]
    for meta in metas:
        text = json.dumps(meta).encode()
        payload = struct.pack("<I", len(text)) + text + b"code"
        with pytest.raises(ValueError):
            unpack(KEY, ENTRY_MAGIC + hashlib.blake2b(payload, digest_size=16).digest() + payload)


@pytest.mark.parametrize(("umask", "file", "folder"),
                         [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o644, 0o755), (0, 0o644, 0o755)])
def test_whoever_the_umask_lets_may_read_and_nobody_else_write(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    before = os.umask(umask)
    try:
        assert ObjectCache(tmp_path / "a" / "b").put(KEY, ENTRY)
    finally:
        os.umask(before)
    made = {p.relative_to(tmp_path).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert made == {"a": folder, "a/b": folder, f"a/b/{KEY.name[:2]}": folder, f"a/b/{KEY.name[:2]}/{KEY.name}.obj": file}
    assert ObjectCache(tmp_path / "a" / "b").get(KEY) == ENTRY


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_code_that_others_may_have_written_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, depth: int) -> None:
    cache = ObjectCache(tmp_path / "team" / "cache")
    assert cache.put(KEY, ENTRY)
    path = cache.path(KEY)
    assert path is not None
    place = [path, *path.parents][depth]
    place.chmod(mode)
    trusted = mode & stat.S_ISVTX and depth > 0      # others may add to a sticky folder, but not replace what is another's
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert [cache.get(KEY), cache.get(KEY)] == ([ENTRY] * 2 if trusted else [None] * 2)
    assert caplog.text.count(f"not loaded in {tmp_path}") == (0 if trusted else 1)
    assert trusted or f"{place} may be written by everybody" in caplog.text
    assert path.exists(), "it is no damage"
    another, begin = ObjectCache(tmp_path / "team" / "cache"), len(caplog.records)
    path.chmod(0o644)       # a file that is written anew belongs to the user; the folders are as they were
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert another.put(KEY, ENTRY) and another.put(KEY, ENTRY)
    assert len(caplog.records) - begin == (0 if trusted or depth == 0 else 1), "it is said when the first object is stored"
    assert cache.put(KEY, ENTRY) and (depth > 0 or cache.get(KEY) == ENTRY)


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    assert ObjectCache(tmp_path / "open" / "cache").put(KEY, ENTRY)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    assert ObjectCache(tmp_path / "link").get(KEY) == ENTRY
    (tmp_path / "open").chmod(0o777)
    assert ObjectCache(tmp_path / "link").get(KEY) is None


def test_entries_that_cannot_be_read_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ObjectCache(tmp_path)
    assert cache.put(KEY, ENTRY)
    path = cache.path(KEY)
    assert path is not None
    path.unlink()
    path.mkdir()    # root may read everything, but no directory
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert cache.get(KEY) is None and cache.get(KEY) is None
    assert caplog.text.count(f"not read in {tmp_path}") == 1


def _write_and_read(directory: str, number: int) -> int:
    cache = ObjectCache(Path(directory))
    good = 0
    for k in range(20):
        entry = CachedObject(SPEC, bytes([number]) * (1000 + 37 * k))
        assert cache.put(KEY, entry)
        found = cache.get(KEY)
        good += found is not None and len(set(found.code)) == 1
    return good


@pytest.mark.slow
def test_concurrent_writers_never_mix(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(lambda n: _write_and_read(str(tmp_path), n), range(4))) == 80
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as processes:
        assert sum(processes.map(_write_and_read, [str(tmp_path)] * 2, range(2))) == 40
    assert [p.suffix for p in tmp_path.glob("*/*")] == [".obj"], "no temporary file is left"


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(pack(KEY, CachedObject(SPEC, b"x" * 1000)))
    cache = ObjectCache(tmp_path, max_bytes=10 * size)
    keys = [ObjectKey(str(n), "", HERE) for n in range(11)]
    for n, key in enumerate(keys[:10]):
        cache.put(key, CachedObject(SPEC, b"x" * 1000))
        path = cache.path(key)
        assert path is not None
        os.utime(path, (n, n))
    assert cache.get(keys[0]) is not None  # used now
    assert cache.put(keys[10], CachedObject(SPEC, b"x" * 1000))
    left = {key for key in keys if cache.get(key) is not None}
    assert keys[0] in left and keys[10] in left and keys[1] not in left and keys[9] in left
    assert sum(p.stat().st_size for p in tmp_path.glob("*/*")) <= 10 * size
    assert not cache.put(keys[1], CachedObject(SPEC, b"x" * 20 * size)), "larger than the whole cache"


def test_directories_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = ObjectCache()
    assert not nowhere.put(KEY, ENTRY) and nowhere.get(KEY) is None and nowhere.evict() == 0
    file = tmp_path / "file"
    file.write_text("not a directory")
    for directory in (file, file / "below", tmp_path / ("long" * 100)):
        cache = ObjectCache(directory)
        with caplog.at_level(logging.WARNING, "svod.object_cache"):
            assert not cache.put(KEY, ENTRY) and not cache.put(KEY, ENTRY) and cache.get(KEY) is None and not cache.has(KEY)
        assert caplog.text.count(f"not kept in {directory}:") == 1
    readable = ObjectCache(tmp_path / "cache")
    assert readable.put(KEY, ENTRY)
    path = readable.path(KEY)
    assert path is not None
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert ObjectCache(tmp_path / "cache").get(KEY) == ENTRY
    finally:
        path.parent.chmod(stat.S_IRWXU)


def test_objects_are_kept_in_the_first_directory_and_read_from_all(tmp_path: Path) -> None:
    assert ObjectCache(tmp_path / "shipped").put(KEY, ENTRY)
    both = ObjectCache(tmp_path / "own", tmp_path / "shipped")
    assert both.get(KEY) == ENTRY and not (tmp_path / "own").exists()
    other = ObjectKey("other", "", HERE)
    assert both.put(other, ENTRY) and both.get(other) == ENTRY and ObjectCache(tmp_path / "own").get(other) == ENTRY
    assert ObjectCache(tmp_path / "shipped").get(other) is None and both.evict() == 0


@pytest.mark.parametrize(("build", "why"), [
    (dataclasses.replace(HERE, target=HERE.target.replace("t2", "t4")), "threads 2, here 4"),
    (dataclasses.replace(HERE, target=HERE.target.replace("znver5/avx2,", "znver3/avx512f,")),
     "CPU znver5, here znver3; features avx2, here avx512f"),
    (dataclasses.replace(HERE, compiler="llvm 2"), "compiler llvm 1, here llvm 2"),
    (dataclasses.replace(HERE, code="another"), "another version of svod"), (HERE, None)])
def test_baked_objects_for_something_else_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Build,
                                                        why: str | None) -> None:
    for baked in (HERE, dataclasses.replace(HERE, target="x86_64/znver5/avx2,fma/l1 48k/l2 1m/l3 32m"),
                  Build("aarch64/other/neon/l1 32k/l2 1m/l3 8m/t2", 7, "gcc", "very old"), build.anywhere):
        assert ObjectCache(tmp_path).put(ObjectKey("k", "c", baked), ENTRY)
    cache = ObjectCache(tmp_path / "own", tmp_path)
    for mark in (False, True):
        if mark:
            (tmp_path / BAKED).touch()
        with caplog.at_level(logging.WARNING, "svod.object_cache"):
            assert cache.get(ObjectKey("x", "c", build)) is None and cache.get(ObjectKey("y", "c", build)) is None
        assert [r.message.startswith(f"no object in {tmp_path} fits this process ({why}), ") for r in caplog.records] == \
            [True] * (mark and why is not None)


TARGETS = [HERE.target.replace("/t2", f"/t{n}") for n in (2, 3, 8)]
NEAREST_FIRST = [HERE, dataclasses.replace(HERE, target=TARGETS[1]), dataclasses.replace(HERE, target=TARGETS[2]),
                 dataclasses.replace(HERE, target=HERE.target.replace("avx2,fma", "avx2,avx512f,fma")),
                 dataclasses.replace(HERE, target=HERE.target.replace("znver5", "znver4")),
                 dataclasses.replace(HERE, compiler="llvm 2"), dataclasses.replace(HERE, code="old"),
                 dataclasses.replace(HERE, code="older"),
                 dataclasses.replace(HERE, target=TARGETS[1], code="old"),
                 Build("x86_64/znver4/avx2/l1 32k/l2 1m/l3 32m/t2", 1, "llvm 1")]


@pytest.mark.parametrize("seed", range(3))
def test_the_reason_is_that_of_the_nearest_build(tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """Whatever the order in which they lie in the directory, which depends on digests."""
    stored = {build: Stored(5) for build in NEAREST_FIRST}
    drawn = random.Random(seed).sample(NEAREST_FIRST, len(NEAREST_FIRST))
    assert [build for build, _ in nearest_first({build: stored[build] for build in drawn}, HERE)] == NEAREST_FIRST
    assert nearest_first({**{build: stored[build] for build in drawn}, NEAREST_FIRST[7]: Stored(6)}, HERE)[6][0] == NEAREST_FIRST[7]
    for build in drawn:
        if build not in NEAREST_FIRST[:3]:
            assert ObjectCache(tmp_path).put(ObjectKey(f"k{seed}", "c", build), ENTRY)
    (tmp_path / BAKED).touch()
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert ObjectCache(tmp_path).get(ObjectKey("x", "c", HERE)) is None
    assert "(features avx512f, here less)" in caplog.text


def test_objects_for_one_thread_are_no_reason_for_code_of_any_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program for one thread leaves no such code in a baked directory. With more threads its kernels, which are asked for later, tell."""
    alone = dataclasses.replace(HERE, target=TARGETS[0].replace("/t2", "/t1"))
    assert ObjectCache(tmp_path).put(ObjectKey("k", "c", alone), ENTRY)
    (tmp_path / BAKED).touch()
    cache = ObjectCache(tmp_path)
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert cache.get(ObjectKey("pool", "c", dataclasses.replace(HERE, target=HERE.target.rpartition("/")[0]))) is None
        assert not caplog.records
        assert cache.remarks(ObjectKey("x", "c", HERE)) == {} and cache.put(ObjectKey("x", "c", HERE), ENTRY)
        assert cache.get(ObjectKey("y", "c", HERE)) is None
    (said,) = caplog.records
    assert "(threads 1, here 2)" in said.message


def test_an_empty_baked_directory_is_said_to_be_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / BAKED).touch()
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert ObjectCache(tmp_path).get(KEY) is None
    assert f"no object in {tmp_path} fits this process (it is empty)" in caplog.text


def test_damaged_objects_may_be_why_none_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ObjectCache(tmp_path).put(KEY, ENTRY)
    (tmp_path / BAKED).touch()
    for path in tmp_path.glob("??/*.obj"):
        path.write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING, "svod.object_cache"):
        assert ObjectCache(tmp_path, named=True).get(ObjectKey("another", "c", HERE)) is None
    assert "(another version of svod, or damaged files)" in caplog.text


def test_a_named_directory_without_objects_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first is told as a warning if it does not exist, the others also if they are empty; none once it has objects."""
    first, second = tmp_path / "mistyped", tmp_path / "empty"
    second.mkdir()

    def said(*directories: Path, named: bool = True) -> list[tuple[str, str]]:
        caplog.clear()
        cache = ObjectCache(*directories, named=named)
        with caplog.at_level(logging.INFO, "svod.object_cache"):
            assert cache.remarks(KEY) == {} and cache.get(ObjectKey("another", "c", HERE)) is None
        return [(r.levelname, r.message.replace(", which SVOD_OBJECT_CACHE or object_cache= names,", "")) for r in caplog.records]
    assert said(first, second, named=False) == []
    assert said(first, second) == [("WARNING", f"{first} does not exist: kernels are compiled, and kept there"),
                                   ("WARNING", f"{second} has no compiled objects: kernels are compiled")]
    assert said(second, first) == [("INFO", f"{second} has no compiled objects: kernels are compiled, and kept there"),
                                   ("WARNING", f"{first} does not exist: kernels are compiled")]
    assert said(first) == [], "once per process"
    file = tmp_path / "file"
    file.touch()
    assert ("WARNING", f"{file} is no directory: kernels are compiled") in said(file)
    filled = tmp_path / "filled"
    assert ObjectCache(filled).put(ObjectKey("other", "c", HERE), ENTRY) and said(filled) == []


def test_what_a_directory_has_is_listed_by_build(tmp_path: Path) -> None:
    other = dataclasses.replace(HERE, target="elsewhere/t1")
    for n, build in enumerate((HERE, HERE, other)):
        assert ObjectCache(tmp_path).put(ObjectKey(str(n), "", build), ENTRY)
    size = len(pack(KEY, ENTRY))
    for n, raw in enumerate((b"", b"svodobj1", pack(KEY, ENTRY)[:60], pack(KEY, ENTRY).replace(b'"build"', b'"bulid"'), b"x" * 100)):
        (tmp_path / KEY.name[:2]).mkdir(exist_ok=True)
        (tmp_path / KEY.name[:2] / f"{n}.obj").write_bytes(raw)
    assert stored_builds(tmp_path).keys() == {HERE, other} and stored_builds(tmp_path)[HERE].objects == 2
    assert abs(stored_builds(tmp_path)[HERE].bytes - 2 * size) < 100 and stored_builds(tmp_path / "nowhere") == {}
