"""Runs svod in unusual surroundings of a process: each case is a separate process with a small product, or a search of it.

Resources are really removed if this machine allows that in a test (namespaces, control groups); otherwise the system's answer is replaced
in Python. A case whose surroundings cannot be made here is skipped with the reason.
"""
from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from svod.bench.load import MachineLoad
from svod.bench.roofline import cached_ceilings
from svod.compile.cpu.host import host_target
from tests.patience import NEVER

ROOT = Path(__file__).resolve().parents[3]
GROUPS = Path("/sys/fs/cgroup")

PROGRAM = """
import json, logging, os, sys
for level in (logging.WARNING, logging.DEBUG) if {logged} else ():
    handler = logging.FileHandler(os.environ["TEST_LOG"] + f".{{level}}")
    handler.setLevel(level)
    logging.getLogger("svod").addHandler(handler)
    logging.getLogger("svod").setLevel(level)
{before}
import numpy as np
from svod import Tensor
{after}
def run(rows):
    a = np.arange(rows * {n}, dtype=np.float32).reshape(rows, {n}) % 7
    b = np.arange({n} * 112, dtype=np.float32).reshape({n}, 112) % 5
    plan = (Tensor(a) @ Tensor(b)).prepare()
    plan.execute()
    assert np.array_equal(plan.outputs[0].reshape(rows, 112), a @ b)
    with open(os.environ["TEST_DONE"], "a") as file:
        file.write(json.dumps([k.opts_source for k in plan.kernels]) + "\\n")
run(40)
{end}
"""


@dataclass(frozen=True)
class Case:
    """A case. `before` and `after`: lines of Python around the import of svod. `end`: lines after the product. `shell`: commands before
    the program. `unshare`: options of that command. `search`: whether BEAM is set. `says`: regular expression that the log matches.
    `logged`: False leaves the log on standard error. `needs`: a package. `runs`: number of products computed."""

    name: str
    before: str = ""
    after: str = ""
    end: str = ""
    env: dict[str, str | None] = field(default_factory=dict)
    shell: str = ""
    unshare: str = ""
    search: bool = False
    says: str = ""
    logged: bool = True
    needs: str = ""
    runs: int = 1


NO_WORKERS = r"BEAM=1: the search could not be run \(.*{}.*\); 1 kernel goes without it"
SEARCHED = r"BEAM=1: searched [\d.]+ s, [1-9]\d* candidate"
ITSELF = "sys.executable = os.path.abspath(__file__); os.chmod(__file__, 0o755)"
NO_SYSTEM = "mount -t tmpfs none /dev/shm -o ro,size=4k && mount -t tmpfs none /sys && mount -t tmpfs none /proc"
READ_ONLY = ("mount --bind / /mnt && mount -o remount,ro,bind /mnt && mount -t proc proc /mnt/proc && mount --rbind /dev /mnt/dev && "
             "mount -t tmpfs none /mnt/dev/shm -o ro && mount --bind $TEST_KEPT /mnt$TEST_KEPT && chroot /mnt sh -c 'cd /; exec \"$@\"' sh")
NO_TMP = ("mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && mount --bind $TEST_KEPT $TEST_KEPT && "
          "mount -o remount,rw,bind $TEST_KEPT")
NEVER_RUNS = """
import _thread, threading
def start_new_thread(function, args, kwargs={}):      # a greenlet runs when the others wait, which native code does not
    return 1
_thread.start_new_thread = start_new_thread
"""
NO_THREADS = """
import threading
def start(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
"""
POOR_STREAM = """
class Poor:
    def write(self, text): return len(text)
    def flush(self): pass
sys.stdout = sys.stderr = Poor()
"""
RAISING_STREAM = """
class Gone:
    encoding = None
    def write(self, text): raise BrokenPipeError(32, "Broken pipe")
    def flush(self): raise BrokenPipeError(32, "Broken pipe")
    def isatty(self): raise ValueError("I/O operation on closed file")
sys.stdout = sys.stderr = Gone()
"""

CASES = [
    Case("as it is, searching", search=True, says=SEARCHED),
    # directories
    Case("no home", search=True, env={"HOME": None, "XDG_DATA_HOME": None, "XDG_CACHE_HOME": None},
         says=f"(?s)this user has no home directory; compiled objects are.*{SEARCHED}",
         unshare="--user --map-user=12345 --map-group=12345"),
    Case("a relative home", env={"HOME": "relhome", "XDG_DATA_HOME": None, "XDG_CACHE_HOME": None}),
    Case("a home that cannot be made", env={"HOME": "/dev/null/home", "XDG_DATA_HOME": None, "XDG_CACHE_HOME": None},
         says="cannot be written"),
    Case("a working directory that was removed", before="os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"),
    Case("a temporary directory that is not there", env={"TMPDIR": "/nowhere"}, search=True, says=SEARCHED),
    Case("nothing can be written", unshare="-m", shell=READ_ONLY, search=True, env={"HOME": "/root/none", "TMPDIR": None},
         says=NO_WORKERS.format("no directory for temporary files can be written")),
    Case("nothing can be written, not searching", unshare="-m", shell=READ_ONLY, env={"HOME": "/root/none"}, says="are not kept"),
    Case("a database in a directory that the process has left", before="import svod; os.makedirs('run/1'); os.chdir('run/1')", search=True,
         env={"SVOD_TUNE_DB": "tune.db"}, after="import atexit; atexit.register(lambda: os.stat('../../tune.db'))", says=SEARCHED),
    Case("a database that is not there", env={"SVOD_TUNE_DB": "no.db"}, says="there is no tuning database .*/no.db"),
    # the system's files are missing or different
    Case("no /proc, /sys and /dev/shm", unshare="-m", shell=NO_SYSTEM, search=True, says=SEARCHED),
    Case("a /tmp that nobody may write", unshare="-m", shell=NO_TMP, env={"TMPDIR": "/dev/shm"}, search=True, says=SEARCHED),
    Case("a PID namespace", unshare="-m -p -f --mount-proc", search=True, says=SEARCHED),
    Case("root of a user namespace", unshare="--user --map-root-user", search=True, says=SEARCHED),
    Case("no affinity", before="del os.sched_getaffinity"),
    # streams
    Case("closed streams", shell="exec <&- >&- 2>&-", search=True, logged=False),
    # a log that stays in the buffer of standard error ends any program with status 120
    Case("a reader that has gone", shell="exec 2>/dev/full >/dev/full", env={"PYTHONUNBUFFERED": "1"}, search=True, logged=False),
    Case("streams that are None", before="sys.stdin = sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None", search=True,
         logged=False),
    Case("streams that only write", before=POOR_STREAM, search=True, logged=False),
    Case("streams that raise", before=RAISING_STREAM, search=True, logged=False,
         end="sys.stdout = sys.stderr = None       # Python's end flushes them"),
    Case("streams in ASCII", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}, search=True, logged=False),
    # the program
    Case("no list of arguments, and no memfd_create", before="del sys.argv, os.memfd_create", search=True, says=SEARCHED),
    Case("no executable", before="sys.executable = ''", search=True, says=NO_WORKERS.format("sys.executable is empty")),
    Case("an executable that is not there", before="sys.executable = '/nowhere/app'", search=True, says=SEARCHED),
    Case("a frozen program", before=f"{ITSELF}; sys.frozen = True", search=True, says=NO_WORKERS.format("this program is frozen")),
    Case("an embedded Python", before=f"{ITSELF}; sys.orig_argv = []", search=True, says=NO_WORKERS.format("embedded")),
    Case("a program that calls itself the executable", before=ITSELF, search=True, says=SEARCHED),
    Case("svod in a zip", env={"PYTHONPATH": "svod.zip"}, search=True, says=SEARCHED),
    # signals
    Case("a background shell, SIGCHLD ignored, umask 077", shell="umask 077 && trap '' INT QUIT CHLD", search=True, says=SEARCHED),
    Case("every signal blocked", before="import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", search=True,
         says=SEARCHED),
    # threads and processes
    Case("threads that are greenlets", before=NEVER_RUNS),
    Case("gevent", before="import gevent.monkey; gevent.monkey.patch_all()", search=True, says=SEARCHED, needs="gevent"),
    Case("no further thread", before=NO_THREADS, search=True, says=NO_WORKERS.format("can't start new thread")),
    Case("a process that was forked", search=True, runs=2, says=f"(?s){SEARCHED}.*{SEARCHED}",
         end="if (child := os.fork()) == 0: run(56)\nelse: assert os.waitpid(child, 0)[1] == 0"),
]


@cache
def why_not(unshare: str) -> str:
    """The reason why namespaces are not available here; "" if they are."""
    if missing := [command for command in ("unshare", "chroot") if shutil.which(command) is None]:
        return f"needs the command {missing[0]} in PATH"
    done = subprocess.run(["unshare", *unshare.split(), "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"needs unshare {unshare}: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home directory of most cases, with compiled objects and measured properties of this machine."""
    home = tmp_path_factory.mktemp("home")
    (home / ".local" / "share" / "svod").mkdir(parents=True)
    cached_ceilings(home / ".local" / "share" / "svod" / "ceilings.json", host_target(), quick=True, watch=lambda: MachineLoad)
    return home


def pack(path: Path) -> None:
    """Pack svod into a zip file."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted((ROOT / "svod").rglob("*")):
            if file.suffix in (".py", ".ll", ".json"):
                archive.write(file, file.relative_to(ROOT))


def environment(case: Case, place: Path, shared: Path) -> dict[str, str]:
    given: dict[str, str | None] = {
        "PYTHONPATH": str(ROOT), "HOME": str(shared), "XDG_DATA_HOME": None, "SVOD_OBJECT_CACHE": str(shared / "objects"),
        "SVOD_TUNE_DB": str(place / "own.db"),
        "TEST_LOG": str(place / "log"), "TEST_DONE": str(place / "done"), "TEST_KEPT": str(place), "OPENBLAS_NUM_THREADS": "1",
        # settings of a search that ends soon
        "BEAM": "1" if case.search else None, "BEAM_WORKERS": "1", "BEAM_ROUND_SIZE": "1", "BEAM_PATIENCE": "1", "SVOD_BENCH_ROUNDS": "6",
        "SVOD_BENCH_SECONDS": "0.1", "DEBUG": None}
    if "HOME" in case.env:      # otherwise both folders are below HOME
        given |= {"SVOD_OBJECT_CACHE": None, "SVOD_TUNE_DB": None}
    given |= case.env
    return {k: v for k, v in {**os.environ, **given}.items() if v is not None}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_svod_runs(case: Case, tmp_path: Path, shared: Path) -> None:
    if case.unshare and (missing := why_not(case.unshare)):
        pytest.skip(missing)
    if case.needs:
        pytest.importorskip(case.needs)
    if "svod.zip" in case.env.values():
        pack(tmp_path / "svod.zip")
    script = tmp_path / "app.py"
    script.write_text(f"#!{sys.executable}" + PROGRAM.format(before=case.before, after=case.after, end=case.end, logged=case.logged,
                                                                    n=8 if case.search else 96))
    words = [sys.executable, str(script)]
    if case.shell:
        words = ["sh", "-c", f"{case.shell} && exec \"$@\"" if not case.shell.endswith(" sh") else f"{case.shell} \"$@\"", "sh", *words]
    if case.unshare:
        words = ["unshare", *case.unshare.split(), *words]
    done = subprocess.run(words, env=environment(case, tmp_path, shared), cwd=tmp_path, capture_output=True, text=True, check=False,
                          timeout=NEVER, stdin=subprocess.DEVNULL)
    log, details = ("".join(f.read_text() for f in tmp_path.glob(f"log.{level}")) for level in (logging.WARNING, logging.DEBUG))
    assert done.returncode == 0, done.stderr + details
    assert "Traceback" not in done.stderr + log, done.stderr + details
    results = [json.loads(line) for line in (tmp_path / "done").read_text().splitlines()]
    assert len(results) == case.runs, "nothing has started the program again"
    assert re.search(case.says, log), details


# -- control groups -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def control_group(controller: str, limits: dict[str, str]) -> Iterator[Path]:
    """A control group with limits, named as in version 1's or version 2's files. Skips the test if none can be made."""
    first = GROUPS / controller if (GROUPS / controller).is_dir() else GROUPS
    group = first / f"svod-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"needs a control group for {controller}: {e}")
    try:
        if not set_limits(group, limits):
            pytest.skip(f"needs a control group for {controller}: {group} has none of {', '.join(limits)}")
        yield group
    finally:
        group.rmdir()


def set_limits(group: Path, limits: dict[str, str]) -> bool:
    """Write the limits for which a group has files. Returns whether there is any."""
    there = {name: value for name, value in limits.items() if (group / name).exists()}
    for name, value in there.items():
        (group / name).write_text(value)
    return bool(there)


def in_group(group: Path) -> list[str]:
    """The words to put before a command so that it runs in a group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@pytest.mark.slow
def test_the_quota_of_a_group_binds_and_its_change_is_seen(tmp_path: Path, shared: Path) -> None:
    program = """
import time
from svod.compile.cpu.host import host_target
from svod.system.process.cores import QUOTA_SECONDS, affinity, usable_cores
from svod.tune.workers.local_executor import LocalExecutor
def cores(): return usable_cores(), host_target().threads
print(*cores(), len(affinity()), flush=True)
with LocalExecutor() as executor: print(executor.workers("compile"), flush=True)
input()
time.sleep(QUOTA_SECONDS)
print(*cores(), flush=True)
"""
    one = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000", "cpu.max": "150000 100000"}
    with control_group("cpu", one) as group, subprocess.Popen(
            [*in_group(group), sys.executable, "-c", program], env=environment(CASES[0], tmp_path, shared), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        usable, threads, allowed = map(int, child.stdout.readline().split())
        assert (usable, threads) == (1, 1)
        assert int(child.stdout.readline()) == 1, "one compiler for each core that may be used"
        set_limits(group, {"cpu.cfs_quota_us": "-1", "cpu.max": "max 100000"})
        child.stdin.write("\n")
        child.stdin.flush()
        assert list(map(int, child.stdout.readline().split()))[:2] == [allowed, allowed]


def test_workers_have_half_of_the_memory_of_a_group(tmp_path: Path, shared: Path) -> None:
    program = "from svod.tune.workers.child import default_memory_limit; print(default_memory_limit())"
    with control_group("memory", {"memory.limit_in_bytes": str(5 << 29), "memory.max": str(5 << 29)}) as group:
        done = subprocess.run([*in_group(group), sys.executable, "-c", program], env=environment(CASES[0], tmp_path, shared),
                              capture_output=True, text=True, check=True)
    assert int(done.stdout) == 5 << 28


@pytest.mark.slow
def test_a_group_that_allows_no_further_thread(tmp_path: Path, shared: Path) -> None:
    case = Case("", search=True)
    script = tmp_path / "app.py"
    script.write_text(PROGRAM.format(before="", after="", end="", logged=True, n=96))
    with control_group("pids", {"pids.max": "1"}) as group:
        done = subprocess.run([*in_group(group), sys.executable, str(script)], env=environment(case, tmp_path, shared),
                              capture_output=True, text=True, check=False)
    log = (tmp_path / f"log.{logging.WARNING}").read_text()
    assert done.returncode == 0, done.stderr
    assert "kernels run on 1 of" in log or os.cpu_count() == 1
    assert re.search(NO_WORKERS.format("(can't start new thread|cannot start a worker process)"), log), log


# -- files and commands -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mounts", ["mount --bind file file", "mount --bind . . && mount --bind file file && mount -o remount,ro,bind ."])
def test_a_file_that_is_mounted_alone_is_written_in_place(mounts: str, tmp_path: Path, shared: Path) -> None:
    if missing := why_not("-m"):
        pytest.skip(missing)
    (tmp_path / "file").write_text("something longer than what follows")
    program = "from pathlib import Path; from svod.system.files import write_text; write_text(Path('file'), 'new')"
    done = subprocess.run(["unshare", "-m", "sh", "-c", f'{mounts} && cd "$PWD" && exec "$@"', "sh", sys.executable, "-c", program],
                          env=environment(CASES[0], tmp_path, shared), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_script_that_fails_is_said_where_sigchld_is_ignored(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "f.py").write_text("raise SystemExit(7)")
    words = [sys.executable, "-m", "svod.cli.tune", "f.py", "--dry-run"]
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", ignoring, *words], env=environment(CASES[0], tmp_path, shared), cwd=tmp_path,
                          capture_output=True, text=True, check=False)
    assert "f.py ended with status 7" in done.stderr, done.stderr
    assert done.returncode != 0
