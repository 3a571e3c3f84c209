"""Small files of /proc and /sys. All of them are optional: they are missing in some containers, and outside of Linux."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM_ROOT = Path("/")


def read(path: Path) -> str:
    """The text of a small file, stripped; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def entries(path: Path, pattern: str) -> list[Path]:
    """The files of a directory that match a glob pattern, sorted; [] if the directory cannot be read."""
    try:
        return sorted(path.glob(pattern))
    except OSError:
        return []


def boot_id() -> str:
    """The id of this machine's current boot; "" if it is not known."""
    return read(SYSTEM_ROOT / "proc/sys/kernel/random/boot_id")


def process_namespace() -> str:
    """The namespace to which this process's ids belong; "" if it is not known."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def mounts() -> str:
    """The mounted file systems that this process sees, as text of /proc/self/mountinfo; "" if it cannot be read."""
    return read(SYSTEM_ROOT / "proc/self/mountinfo")


def processes_with(setting: str) -> list[int]:
    """Ids of this user's other processes that have `setting` (NAME=VALUE) in their environment; none without /proc."""
    wanted = setting.encode()
    pids = []
    for entry in entries(SYSTEM_ROOT / "proc", "[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
        except OSError:         # the process has ended, or belongs to another user
            continue
    return pids


def processes_of(directory: str) -> list[int]:
    """Ids of other processes that have a directory among their arguments, and of their descendants, which may have overwritten their
    arguments. Empty without /proc."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in entries(SYSTEM_ROOT / "proc", "[0-9]*"):
        with contextlib.suppress(OSError):      # the process has ended meanwhile
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            if pid != os.getpid() and directory.encode() in (entry / "cmdline").read_bytes():
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def offer_to_end() -> None:
    """Make this process the first that the system kills when memory runs out. Does nothing if the system does not allow that."""
    try:
        (SYSTEM_ROOT / "proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return


# -- control groups -----------------------------------------------------------------------------------------------------
def control_groups(controller: str, root: Path = SYSTEM_ROOT) -> Iterator[tuple[Path, int]]:
    """Directories of the control groups that limit this process by `controller` ("cpu", "memory"), each with the version of its format
    (1 or 2), from the innermost group outwards."""
    mount = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, group = parts
        if controllers == "":
            tops, version = [mount, mount / "unified"], 2
        elif controller in controllers.split(","):
            tops, version = [mount / controllers, mount / controller], 1
        else:
            continue
        for top in dict.fromkeys(t for t in tops if os.path.isdir(t)):
            # inside a container the path may be the host's; then the mount point is the container's group
            here = top / group.lstrip("/")
            while here != top and top in here.parents:
                yield here, version
                here = here.parent
            yield top, version
