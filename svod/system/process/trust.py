"""Write permissions of files: code is loaded only from files that nobody but the user and root can change."""
from __future__ import annotations

import os
import stat
from pathlib import Path


def writers(path: Path) -> str:
    """Tell who, other than the user and root, may change the file at `path` or replace it in a parent folder, such as "/srv/team may be
    written by its group"; "" if nobody may. `path` has no symbolic links. A folder with the sticky bit counts as writable by its owner
    only: others may add files to it, but own what they add. A group whose only member is the user counts as the user. The owner of the
    root directory counts as root, because root may have another number in a user namespace. Raises OSError."""
    if not hasattr(os, "geteuid"):
        return ""
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for p in (path, *path.parents):
        s = os.lstat(p)
        if s.st_uid not in trusted:
            return f"{p} belongs to {_user(s.st_uid)}"
        if s.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(s.st_mode) and s.st_mode & stat.S_ISVTX):
            return f"{p} may be written by everybody"
        if s.st_mode & stat.S_IWGRP and not (stat.S_ISDIR(s.st_mode) and s.st_mode & stat.S_ISVTX) and not _is_private(s.st_gid):
            return f"{p} may be written by its group"
    return ""


def _user(uid: int) -> str:
    import pwd
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _is_private(gid: int) -> bool:
    """Whether a group is the user's own: it has the user's name and no other member. The group root never counts: containers run users
    in it."""
    import grp
    import pwd
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid != 0 and user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
