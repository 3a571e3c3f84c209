"""Rights to write to a file: what is loaded as code comes from files that nobody but the user and root can change."""
from __future__ import annotations

import os
import stat
from pathlib import Path


def writers(path: Path) -> str:
    """A sentence on who but the user and root may change the file at `path`, a path without symbolic links, or replace it in a folder
    above, such as "/srv/team may be written by its group"; "" where nobody may. Folders with the sticky bit count as their owner's:
    others may add to them, and own what they add. A group that the user has alone counts as the user. Whoever owns
    the root directory counts as root, who has no number of its own in a user namespace. Raises OSError."""
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
    """Whether a group is the user's own: of the same name, and without another member. Root's is not: containers run users in it."""
    import grp
    import pwd
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid != 0 and user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
