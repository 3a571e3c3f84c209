"""Ray nodes for tests and experiments: processes on this machine that can be killed, frozen and thawed like machines. Each has a loopback
address of its own and accepts no connections from outside."""
from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import svod
from svod.tune.workers.ray_executor import TOKEN
from tests.patience import wait_until

STORE = str(80 << 20)       # bytes of an object store; Ray's minimum


class Node:
    """A node: one process `ray start --block`, with all its descendants."""

    def __init__(self, address: str, *options: str, head: str | None = None, **environment: str) -> None:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if head is None else [f"--address={head}:{PORT}"]
        program = Path(sys.executable).parent / "ray"
        log = Path("/tmp") / f"svod-node-{os.getpid()}-{address}.log"
        with log.open("wb") as file:
            self.process = subprocess.Popen([str(program), "start", *where, f"--node-ip-address={address}", "--disable-usage-stats",
                                             "--block", f"--object-store-memory={STORE}", *options],
                                            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, **environment},
                                            stdout=file, stderr=file)
        self.log, self.address, self.seen = log, address, set[int]()
        wait_until(lambda: "Ray runtime started" in log.read_text(errors="replace") or self.process.poll() is not None)
        if "Ray runtime started" not in (said := log.read_text(errors="replace")):
            raise RuntimeError(f"the node {address} did not start: {said[-2000:]}")

    def processes(self) -> list[int]:
        """Living processes, the first one first."""
        found = [self.process.pid, *below(self.process.pid)] if self.process.poll() is None else []
        self.seen |= set(found)
        return found

    def signal(self, number: signal.Signals) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all processes of the node at once, as a power cut does."""
        self.signal(signal.SIGSTOP)         # no process acts while the others end
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Stop the node in an orderly way."""
        self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.unlink(missing_ok=True)


PORT = 20000 + os.getpid() % 10000


def below(pid: int) -> list[int]:
    """The live descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [c for p in new for c in children.get(p, ())]
        found += new
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> bytes:
    """The command line of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def workers_of(nodes: Iterable[Node]) -> list[int]:
    """The processes of svod's workers (fork servers and their children) on the nodes."""
    return [pid for node in nodes for pid in node.processes() if b"svod.tune.workers.server_main" in command_of(pid)]


def another_version(directory: Path) -> dict[str, Any]:
    """The environment of a node with another version of svod: a copy whose source differs by a comment."""
    root = Path(svod.__file__).resolve().parents[1]
    shutil.copytree(root / "svod", directory / "svod", ignore=shutil.ignore_patterns("__pycache__"))
    with (directory / "svod" / "errors.py").open("a", encoding="utf-8") as file:
        file.write("\n# another version\n")
    return {"PYTHONPATH": f"{directory}{os.pathsep}{root}"}
