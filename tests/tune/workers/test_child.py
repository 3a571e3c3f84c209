"""The child process: every way to fail becomes a record, costs only itself, and leaves nothing behind."""
from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from svod.errors import TuneError
from svod.tune.workers.child import STOPPED, YOUNG_OBJECTS, Child, Request, WasStopped, make_request, receive_frame
from svod.tune.workers.forkserver import ForkServer, ServerLost
from svod.tune.workers.jobs import Outcome, WorkerConfig
from tests.patience import NEVER, wait_until
from tests.tune.fault_jobs import FAULTS

ROOT = str(Path(__file__).resolve().parents[3])
JOBS = "tests.tune.fault_jobs"
CONFIG = WorkerConfig(preload=("numpy", "llvmlite.binding"), job_modules=(JOBS,), paths=(ROOT,), memory_bytes=1 << 29, setup_deadline=NEVER)


def call(job: str, item: object, deadline: float = NEVER, setup: object = None) -> Request:
    return make_request(f"{JOBS}:{job}", item, deadline, setup)


def is_gone(pid: int) -> bool:
    """Whether a process has ended: it does not exist, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return not Path("/proc").is_dir() and False


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    s = ForkServer(CONFIG)
    yield s
    s.close()


@pytest.fixture
def child(server: ForkServer) -> Iterator[Child]:
    c = Child(server)
    yield c
    c.close()


# fault → (status, kind, part of the message); deadlines are long except where running into one is the point
EXPECTED = {
    "raise": ("error", "ValueError", "no such tile"),
    "raise exit": ("error", "SystemExit", "3"),
    "raise interrupt": ("error", "KeyboardInterrupt", ""),
    "raise lost": ("error", "DeviceLost", "an illegal memory access"),
    "raise unprintable": ("error", "Unprintable", "cannot be made"),
    "raise memory": ("error", "MemoryError", ""),
    "unpicklable": ("error", "FormatError", "not plain data"),
    "object": ("error", "FormatError", "not plain data"),
    "numpy": ("error", "FormatError", "numpy.float64"),
    "nested": ("error", "FormatError", "RecursionError"),
    "too large": ("error", "", ""),                 # the limit of messages or of memory, whichever comes first
    "large": ("ok", "", ""),
    "print": ("ok", "", ""),
    "read stdin": ("ok", "", ""),
    "segfault": ("crash", "SIGSEGV", "Segmentation fault"),
    "abort": ("crash", "SIGABRT", "Cannot select intrinsic"),
    "stack overflow": ("crash", "SIGSEGV", ""),
    "exit": ("crash", "exit 7", ""),
    "exit 0": ("crash", "exit 0", ""),
    "memory": ("error", "MemoryError", ""),
    "garbage": ("crash", "protocol", "frame"),
    "close": ("crash", "SIGKILL", ""),
    "print forever": ("error", "OSError", "large"),
    "sleep": ("timeout", "deadline", "0.3 s"),
    "spin python": ("timeout", "deadline", "0.3 s"),
    "spin native": ("timeout", "deadline", "0.3 s"),
}


def test_every_fault_is_expected() -> None:
    assert EXPECTED.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", EXPECTED)
def test_fault_becomes_a_record_and_the_next_item_works(child: Child, capfd: pytest.CaptureFixture[str], fault: str) -> None:
    status, kind, message = EXPECTED[fault]
    outcome = child.run(call("fault", fault, 0.3 if status == "timeout" else NEVER))
    assert outcome.status == status, outcome
    assert kind in outcome.kind and message in outcome.message, outcome
    assert child.run(call("echo", [1, "next"])).value == [1, "next"]
    assert capfd.readouterr() == ("", "")


def test_large_results_and_items_arrive_whole(child: Child) -> None:
    assert child.run(call("fault", "large")).value == b"\x07" * (20 << 20)
    data = bytes(range(256)) * 4096
    assert child.run(call("echo", data)).value == data


def test_a_batch_goes_on_behind_hangs_and_crashes(child: Child) -> None:
    items = [1, "segfault", 2, "spin native", 3, "raise", 4, "raise lost", 5]
    outcomes = [child.run(call("fault_or_add", item, 0.5 if item == "spin native" else NEVER, setup=100)) for item in items]
    assert [o.status for o in outcomes] == ["ok", "crash", "ok", "timeout", "ok", "error", "ok", "error", "ok"]
    values = [o.value for o in outcomes if o.ok]
    assert [v["sum"] for v in values] == [101, 102, 103, 104, 105]
    # state lives as long as the process: it is new after a crash, a hang or a lost device, and kept after an exception
    assert [v["count"] for v in values] == [1, 1, 1, 2, 1]
    assert child.starts == 4


def test_setup_is_sent_once_per_payload_and_again_after_another(child: Child) -> None:
    counts = [child.run(call("add_state", 0, setup=s)).value["count"] for s in (5, 5, 6, 5)]
    assert counts == [1, 2, 1, 1]


def test_a_setup_that_raises_or_crashes_is_the_items_outcome(child: Child) -> None:
    raised = child.run(call("add_state", 0, setup=-1))
    assert (raised.status, raised.kind) == ("error", "ValueError") and "in the setup of" in raised.message
    for _ in range(4):
        crashed = child.run(call("add_state", 0, setup=-2))
        assert (crashed.status, crashed.kind) == ("crash", "SIGABRT") and "in the setup of" in crashed.message
    assert child.starts == 3    # the crashing setup was tried twice, not four times; then the good one
    assert child.run(call("add_state", 1, setup=1)).value["sum"] == 2


def test_a_process_is_isolated(child: Child, server: ForkServer) -> None:
    facts = child.run(call("facts", None)).value
    assert facts["pid"] not in (os.getpid(), server.pid) and facts["ppid"] == server.pid
    assert facts["modules"] == ["numpy", "llvmlite.binding"], "the fork server has preloaded something else"
    assert facts["young"] == YOUNG_OBJECTS, "garbage is collected as often as in any process"
    assert facts["main"] is None, "the user's __main__ was imported"
    assert facts["core"] == 0 and facts["sigint_ignored"] and facts["stdin"] == b""


def test_what_one_item_leaves_in_memory_is_not_the_next_ones_fault(child: Child) -> None:
    assert child.run(call("leave_garbage", 250)).ok
    assert child.run(call("take_memory", 250)).value == 250, "both at once are more than the limit"
    assert child.run(call("take_memory", 600)).kind == "MemoryError" and child.starts == 1


def test_a_step_has_a_limit_of_its_own(child: Child) -> None:
    outcome = child.run(call("step", 0.05))
    assert (outcome.status, outcome.kind) == ("timeout", "step")
    assert child.run(call("short_step", 0.5)).value == "done"


def test_jobs_outside_the_registry_are_errors(child: Child) -> None:
    outcome = child.run(make_request("os:system", "true", 10.0))
    assert (outcome.status, outcome.kind) == ("error", "TuneError")


def test_interrupting_from_another_thread(child: Child) -> None:
    import threading
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(child.run(call("fault", "spin native", 60.0))))
    thread.start()
    assert wait_until(lambda: child.pid != 0)
    while thread.is_alive():
        child.interrupt()
        thread.join(0.02)
    assert outcomes[0].status == "crash" and outcomes[0].kind == "SIGKILL"


def test_ending_leaves_no_process(server: ForkServer) -> None:
    child = Child(server)
    pid = child.run(call("facts", None)).value["pid"]
    child.close()
    child.close()
    assert is_gone(pid)


def test_a_lost_server_is_reported_and_takes_its_children_along() -> None:
    server = ForkServer(CONFIG)
    child = Child(server)
    pid = child.run(call("facts", None)).value["pid"]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ServerLost):
        child.run(call("fault", "sleep"))
    assert wait_until(lambda: is_gone(pid))
    child.close()
    server.close()


def test_closing_the_server_kills_what_runs() -> None:
    server = ForkServer(CONFIG)
    children = [Child(server) for _ in range(3)]
    pids = [c.run(call("facts", None)).value["pid"] for c in children]
    server.close()
    assert all(wait_until(lambda p=p: is_gone(p)) for p in pids)  # type: ignore[misc]
    for c in children:
        c.close()


def test_a_preload_that_fails_is_a_clear_error() -> None:
    server = ForkServer(WorkerConfig(preload=("no_such_module",)))
    with pytest.raises(TuneError, match="no_such_module"):
        server.wait_until_ready()
    with pytest.raises(TuneError, match="no_such_module"):
        Child(server).run(call("echo", 1))
    server.close()


DRIVER = """import sys; sys.path.insert(0, sys.argv[1])
print("main runs", flush=True)
from tests.tune.workers.test_child import CONFIG, call
from svod.tune.workers.child import Child
from svod.tune.workers.forkserver import ForkServer
server = ForkServer(CONFIG)
child = Child(server)
pid = child.run(call("facts", None)).value["pid"]
print(server.pid, pid, flush=True)
print(child.run(call("fault", sys.argv[2])).describe(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["spin native", "sleep"])
def test_killing_the_driver_leaves_nothing_running(tmp_path: Path, fault: str) -> None:
    """The driver is a script without a __main__ guard. It is killed by SIGKILL while a candidate runs."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), ROOT, fault], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "main runs\n"
    pids = [int(p) for p in driver.stdout.readline().split()]
    driver.kill()
    assert driver.communicate()[0] == ""        # the script ran once
    assert all(wait_until(lambda p=p: is_gone(p)) for p in pids)  # type: ignore[misc]


def test_interrupts_reach_only_the_driver(tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of the foreground group: the fork server and the child must survive it."""
    script = tmp_path / "driver.py"
    script.write_text("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), ROOT, "read stdin"], stdout=subprocess.PIPE, text=True, process_group=0)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "main runs\n"
    for _ in range(50):     # while the server starts, and after
        os.killpg(driver.pid, signal.SIGINT)
        time.sleep(0.005)
    assert "ok" in driver.communicate()[0]


@pytest.mark.parametrize("stopped_after_question", [True, False])
def test_a_stop_between_question_and_first_look_is_seen(stopped_after_question: bool) -> None:
    """The child may stop this process before it waits for the answer: the time from the question on counts."""
    ours, theirs = socket.socketpair()
    now = time.monotonic()
    with ours, theirs, pytest.raises(TimeoutError) as raised:
        receive_frame(ours, now - 1.0, now - (2.0 * STOPPED if stopped_after_question else 0.5 * STOPPED))
    assert isinstance(raised.value, WasStopped) == stopped_after_question


@pytest.mark.slow
def test_a_deadline_that_passes_while_the_machine_stands_still_says_nothing_about_the_item() -> None:
    """The process that waits for the child is stopped, as on a frozen node, and continues after the deadline: the item may run again."""
    waiting = subprocess.Popen([sys.executable, "-c", f"""import os, sys; sys.path.insert(0, {ROOT!r})
from svod.tune.workers import child
from svod.tune.workers.forkserver import ForkServer, ServerLost
from tests.tune.workers.test_child import CONFIG, call
child.STOPPED = 0.5
server = ForkServer(CONFIG)
worker = child.Child(server)
assert worker.run(call("echo", 1)).ok
try: print(worker.run(call("stop", os.getpid(), deadline=1.0)).status)
except ServerLost as e: print(e)
print(worker.run(call("echo", 2)).value)
worker.close(); server.close()
"""], stdout=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(waiting.pid, os.WUNTRACED)[1])
    time.sleep(2.0)     # past the deadline, by more than STOPPED
    waiting.send_signal(signal.SIGCONT)
    said, again = waiting.communicate(timeout=NEVER)[0].splitlines()
    assert re.search(r"stood still for ([2-9]|\d\d+) s", said) and again == "2"
