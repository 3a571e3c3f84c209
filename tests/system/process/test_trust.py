"""Write permissions of a file, derived from its owner and mode and those of the folders above it."""
from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from svod.system.process.trust import writers


def _file(tmp_path: Path) -> Path:
    path = tmp_path.resolve() / "folder" / "file"
    path.parent.mkdir(mode=0o755)
    path.touch(0o644)
    return path


def test_the_users_own_files(tmp_path: Path) -> None:
    assert writers(_file(tmp_path)) == "" and writers(Path("/")) == ""


def test_the_first_that_others_may_write_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path)
    path.parent.chmod(0o777)
    assert writers(path) == f"{path.parent} may be written by everybody"
    path.parent.chmod(0o1777)
    assert writers(path) == ""
    path.chmod(0o646)
    assert writers(path) == f"{path} may be written by everybody"


def test_a_group_is_trusted_where_the_user_has_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path)
    path.parent.chmod(0o775)
    gid, me = path.parent.stat().st_gid, ("me", "x", 77, 5, "", "/home/me", "/bin/sh")
    user, others = pwd.struct_passwd((*me[:3], gid, *me[4:])), ["me", "you"]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    for name, members, its_group, private in (("me", [], 7, True), ("me", ["me"], 7, True), ("me", others, 7, False),
                                              ("team", [], 7, False), ("me", [], 0, False)):
        monkeypatch.setattr(grp, "getgrgid", lambda g, name=name, members=members: grp.struct_group((name, "x", g, members)))
        monkeypatch.setattr(os, "lstat", _with_group(its_group))
        user = pwd.struct_passwd((*me[:3], its_group, *me[4:]))
        assert writers(path) == ("" if private else f"{path.parent} may be written by its group")


def _with_group(gid: int, lstat: object = os.lstat) -> object:
    def changed(path: Path) -> os.stat_result:
        s = lstat(path)     # type: ignore[operator]
        return os.stat_result((*s[:5], gid, *s[6:]))
    return changed


def test_another_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path.parent, 54321, -1)
    assert writers(path) == f"{path.parent} belongs to the user 54321"
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert writers(path) == ""      # a file of root below the user's own folder
