"""The identity of svod's code: its files as they were at import, in every form of installation."""
from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import svod
from svod.system.source import SourceFiles

PACKAGE = Path(svod.__file__).parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with two parts: two modules, one LLVM IR text and one table."""
    root = tmp_path / "package"
    for name, text in {"__init__.py": "", "core/a.py": "x = 1\n", "core/deep/b.py": "y = 2\n", "tune/c.py": "z = 3\n",
                       "core/r.ll": "; ir\n", "core/t.json": "[1.5]\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _replace(path: Path, text: str) -> None:
    """Replace a file as package managers do: write another one and rename it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.mark.parametrize("name", ["__init__.py", "core/a.py", "core/deep/b.py", "tune/c.py", "core/r.ll", "core/t.json"])
def test_each_file_counts_for_the_whole_and_for_its_part(package: Path, name: str) -> None:
    before = SourceFiles(package)
    _, whole, core = before.is_known(), before.digest(), before.digest("core")
    _replace(package / name, "w = 4\n")
    after = SourceFiles(package)
    assert after.is_known() and after.digest() != whole
    assert (after.digest("core") != core) is name.startswith("core/")
    assert after.digest("core/a.py") != after.digest("core")


def test_a_digest_does_not_depend_on_place_or_time(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "core" / "a.py", (1, 1))
    assert SourceFiles(package).digest() == SourceFiles(tmp_path / "copy").digest()


@pytest.mark.parametrize("change", [lambda p: _replace(p / "core" / "a.py", "x = 9\n"),
                                    lambda p: (p / "core" / "a.py").write_text("x = 9\n"), lambda p: (p / "core" / "new.py").touch(),
                                    lambda p: (p / "tune" / "c.py").unlink(),
                                    lambda p: shutil.rmtree(p)], ids=["replaced", "written", "added", "removed", "all removed"])
def test_files_that_change_before_they_are_looked_at_are_not_what_runs(package: Path, change: object) -> None:
    os.utime(package / "core" / "a.py", (1, 1))     # a change within the resolution of time stamps
    one, two = SourceFiles(package), SourceFiles(package)
    change(package)     # type: ignore[operator]
    assert not one.is_known() and not two.is_known()
    assert one.digest().startswith("unknown") and one.digest() == one.digest() and one.digest() != two.digest()


def test_modules_that_are_imported_after_a_change_are_noticed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceFiles(package)
    digest = source.digest()
    assert source.is_known()
    _replace(package / "core" / "a.py", "x = 9\n")
    monkeypatch.setitem(sys.modules, "imported.late", sys)
    assert not source.is_known() and source.digest() == digest, "what was compiled before belongs to the old digest"


def test_compiled_only(package: Path) -> None:
    """Bytecode without sources: another program has another digest, another time of compilation has not."""
    def compiled(text: str, mtime: float) -> str:
        (package / "core" / "a.py").write_text(text)
        os.utime(package / "core" / "a.py", (mtime, mtime))
        assert compileall.compile_dir(package, quiet=1, legacy=True, force=True)
        for source in package.rglob("*.py"):
            source.rename(source.with_suffix(".away"))
        result = SourceFiles(package)
        digest = result.digest()
        assert result.is_known() and not digest.startswith("unknown")
        for source in package.rglob("*.away"):
            source.rename(source.with_suffix(".py"))
        for bytecode in package.rglob("*.pyc"):
            bytecode.unlink()
        return digest
    assert compiled("x = 1\n", 1e9) == compiled("x = 1\n", 2e9) != compiled("x = 2\n", 1e9)


def test_bytecode_that_python_does_not_compare_with_its_source(package: Path) -> None:
    a = package / "core" / "a.py"
    plain = SourceFiles(package).digest()
    py_compile.compile(str(a), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    assert SourceFiles(package).digest() == plain
    py_compile.compile(str(a), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    loaded = SourceFiles(package).digest()
    a.write_text("x = 5\n")
    assert SourceFiles(package).digest() == loaded, "Python goes on executing the bytecode"


def _zipped(package: Path, archive: Path) -> Path:
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(package.rglob("*.py")):
            file.write(path, Path("package") / path.relative_to(package))
    return archive / "package"


def test_an_archive(package: Path, tmp_path: Path) -> None:
    root = _zipped(package, tmp_path / "app.zip")
    source = SourceFiles(root)
    first = source.digest()
    assert source.is_known() and not first.startswith("unknown") and source.digest("core") == first
    (package / "core" / "a.py").write_text("x = 2\n")
    _zipped(package, tmp_path / "app.zip")
    assert not SourceFiles.is_known(source) or source.digest() == first
    assert SourceFiles(root).digest() != first


def test_a_frozen_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen program's modules are in its executable; if that cannot be read, the code is unknown."""
    data = tmp_path / "bundle" / "package"
    data.mkdir(parents=True)
    (data / "r.ll").write_text("; ir\n")
    assert not SourceFiles(data).is_known() and SourceFiles(data).digest().startswith("unknown")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "app"))
    assert not SourceFiles(data).is_known()
    digests = set()
    for content in (b"one", b"two"):
        (tmp_path / "app").write_bytes(content)
        assert SourceFiles(data).is_known()
        digests.add(SourceFiles(data).digest("core"))
    assert len(digests) == 2


UPDATED = '''
import os, pathlib, sys
import svod.tensor, svod.compile.lower.math, svod.prepare
import numpy as np
from svod.config import BeamConfig, PrepareConfig
file = pathlib.Path(svod.compile.lower.math.__file__)
file.with_suffix(".new").write_text(file.read_text() + "# the next version\\n")
os.replace(file.with_suffix(".new"), file)
plan = (svod.Tensor(np.ones((8, 8), np.float32)) * 3).exp().sum(0).prepare(
    PrepareConfig(object_cache=sys.argv[1], db=sys.argv[2], beam=BeamConfig(width=1, budget=20, workers=1)))
plan.execute()
print([k.opts_source for k in plan.kernels])
'''


@pytest.mark.slow
def test_an_update_under_a_running_process_reaches_neither_the_cache_nor_the_workers(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "svod")
    script = tmp_path / "server.py"
    script.write_text(UPDATED)
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "objects"), str(tmp_path / "tune.db")], capture_output=True,
                          text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=300)
    assert done.returncode == 0 and done.stdout == "['heuristic']\n", done.stderr
    assert not list(tmp_path.glob("objects/*/*")), "its objects are not those of the new files"
    assert done.stderr.count("compiled objects are not kept") == 1 and done.stderr.count("another svod") == 1, done.stderr
