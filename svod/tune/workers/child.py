"""The process that compiles or times candidates, from both sides.

`run_child` is its main loop. `Child` is the handle in the searching process (or in a Ray actor): it starts the process when there is work,
kills it with SIGKILL at the deadline, replaces it, and turns everything that can happen into an `Outcome`.

    item ──encode──▶ [child: function(item, state)] ──encode──▶ Outcome("ok", value)
                       │ raises → "error"     │ dies → "crash"     │ still running at the deadline → "timeout"

Inside, the limits are: no core files, a bound on writable memory and on what it writes to files, stdin closed, stdout and
stderr in a log of which the end becomes the message of a crash. A candidate that hangs or crashes costs itself and 10 ms: the
rest of a batch goes on in a fresh process, which receives the setup again.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from svod.errors import FormatError
from svod.tune.workers.forkserver import ForkServer, ServerLost, SpawnServer, open_log, read_log
from svod.tune.workers.jobs import MAX_MESSAGE, Outcome, decode, encode, resolve_job

HEADER = struct.Struct("<Q")
BACKSTOP = 5.0              # seconds after its deadline at which a child whose parent is gone or stopped kills itself
MAX_FILE = 32 << 20         # bytes a child may write to one file, its log included
MAX_SETUP_FAILURES = 2      # a setup that crashed or hung this often is not tried again

_child_deadline: float | None = None    # in a child, while an item runs: time.monotonic() at which the backstop fires


@dataclass(frozen=True, slots=True)
class Request:
    """One item for a worker, encoded. `setup_key` names the payload ("" without one); `cpus` are the cores to stay on (none: all)."""

    job: str
    item: bytes
    deadline: float             # seconds, from the start of the item on a ready worker
    setup: bytes = b""
    setup_key: str = ""
    cpus: tuple[int, ...] = ()


def make_call(job: str, item: Any, deadline: float, setup: Any = None, cpus: tuple[int, ...] = ()) -> Request:
    """A Call of plain data. Raises FormatError when item or setup is not plain data."""
    payload = b"" if setup is None else encode(setup)
    return Request(job, encode(item), deadline, payload, setup_key(job, payload), cpus)


def setup_key(job: str, payload: bytes) -> str:
    """The name under which a worker remembers the state made from `payload`."""
    return blake2b(job.encode() + b"\0" + payload, digest_size=16).hexdigest() if payload else ""


def send_frame(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(HEADER.pack(len(payload)))
    sock.sendall(payload)


def receive_frame(sock: socket.socket, until: float | None = None) -> bytearray:
    """The next frame. Raises EOFError at the end of the stream, TimeoutError when time.monotonic() passes `until`, FormatError for a length
    no frame has."""
    (size,) = HEADER.unpack(_receive(sock, HEADER.size, until))
    if size > MAX_MESSAGE + 4096:
        raise FormatError(f"a frame of {size} bytes; the limit is {MAX_MESSAGE}")
    return _receive(sock, size, until)


def _receive(sock: socket.socket, size: int, until: float | None) -> bytearray:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        # once the time is up, one look that does not wait: a result that is there already counts
        sock.settimeout(None if until is None else max(0.0, until - time.monotonic()))
        try:
            n = sock.recv_into(view[have:])
        except BlockingIOError as e:
            raise TimeoutError("nothing arrived in time") from e
        if n == 0:
            raise EOFError("the other side closed")
        have += n
    return data


# -- inside the child ------------------------------------------------------------------------------
def run_child(fd: int, log: int, config: dict[str, Any]) -> None:
    """Serve items from the socket `fd` until it closes. `config`: the fields of WorkerConfig, and `cpus`."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    if log > 2:
        os.close(log)
    faulthandler.enable(2)
    _limit_resources(config)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    modules = tuple(config["job_modules"])
    state: Any = None
    while True:
        try:
            frame = receive_frame(sock)
        except (EOFError, OSError):
            return
        started = time.perf_counter()
        try:
            kind, job, deadline, raw = decode(frame)
            del frame
            run, setup = resolve_job(job, modules)
            item = decode(raw)
            _arm(deadline + BACKSTOP)
            started = time.perf_counter()
            if kind == "setup":
                state = None        # the old one goes before the new one is made: both may be large
                state = setup(item) if setup is not None else item
                answer = encode(("ok", None, time.perf_counter() - started))
            else:
                result = run(item, state)
                seconds = time.perf_counter() - started
                answer = encode(("ok", result, seconds))
                del result
        except BaseException as e:  # the border of the worker: whatever a candidate raises becomes a record
            answer = encode(("error", type(e).__name__, _text_of(e), time.perf_counter() - started))
        _disarm()
        with contextlib.suppress(OSError, ValueError):     # the log is full, or a candidate closed the stream
            sys.stdout.flush()
        try:
            send_frame(sock, answer)
        except OSError:
            return


def _text_of(e: BaseException) -> str:
    try:
        return str(e)[:20_000]
    except Exception:  # a __str__ that raises is a candidate's failure too, not the worker's
        return "(its text cannot be made)"


def _limit_resources(config: dict[str, Any]) -> None:
    memory = config["memory_bytes"] or default_memory_limit()
    # RLIMIT_DATA counts private writable memory on Linux; RLIMIT_AS would also count what GPU drivers merely reserve
    for what, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, MAX_FILE)):
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(OSError, ValueError):     # a limit this system does not have; the deadline still holds
            resource.setrlimit(what, (limit, hard))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):                  # no /proc
            Path("/proc/self/oom_score_adj").write_text("1000")     # where memory runs out, this process goes, not the user's
        if config.get("cpus"):
            with contextlib.suppress(OSError):              # cores this container may not use: the job records where it ran
                os.sched_setaffinity(0, config["cpus"])
    if config["niceness"]:
        os.nice(config["niceness"])


def default_memory_limit() -> int:
    """Half of the memory of this machine or container, in bytes, at least 1 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):          # no cgroup, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(1 << 30, total // 2)


def _arm(seconds: float) -> None:
    """Let the kernel end this process after `seconds`: works in native code and with the GIL held."""
    global _child_deadline
    _child_deadline = time.monotonic() + seconds
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))


def _disarm() -> None:
    global _child_deadline
    _child_deadline = None
    signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def step_limit(seconds: float) -> Iterator[None]:
    """Inside a job: end the worker (outcome `timeout`, kind "step") if the body takes longer than `seconds` of wall time.

    For a short limit within an item whose own deadline is long: one first run of a kernel, after seconds of making inputs. Costs two
    system calls, sends nothing, and is exact to a millisecond. Must be entered in the main thread; without effect in the
    `inline` executor, where it would end the user's process."""
    if _child_deadline is None:
        yield
        return
    before = _child_deadline
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(before - time.monotonic(), 1e-6))


# -- in the searching process ----------------------------------------------------------------------
class Child:
    """A worker process that is there when needed. Not thread-safe, except `interrupt`.

    `run` never raises for what a candidate does; it raises ServerLost when the fork server is gone (the item may run again) and
    TuneError when no process can be started at all. Start, setup and waiting are outside the deadline of an item."""

    def __init__(self, server: ForkServer | SpawnServer) -> None:
        self._server = server
        self._log = open_log()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._cpus: tuple[int, ...] = ()
        self._setup = ""                                    # key of the setup the process holds
        self._failures: dict[str, tuple[int, Outcome]] = {}     # setups that crashed or hung
        self.starts = 0                                     # processes started so far

    @property
    def pid(self) -> int:
        """Process id, or 0 while there is no process."""
        return self._pid

    def run(self, call: Request) -> Outcome:
        """One item, start to end."""
        if self._socket is not None and self._cpus != call.cpus:
            self.stop()         # threads of the old process may be pinned elsewhere
        if self._socket is None:
            self._start(call.cpus)
        if call.setup_key and call.setup_key != self._setup:
            failed = self._set_up(call)
            if failed is not None:
                return failed
        return self._exchange("item", call.job, call.deadline, call.item)

    def run_batch(self, job: str, items: Iterable[Any], deadline: float, setup: Any = None) -> Iterator[tuple[int, Outcome]]:
        """(index, Outcome) for every item, in order, as they complete; an item that hangs or crashes costs only itself."""
        first = make_call(job, None, deadline, setup)
        for i, item in enumerate(items):
            yield i, self.run(Request(job, encode(item), deadline, first.setup, first.setup_key))

    def interrupt(self) -> None:
        """Kill what runs now; `run` in another thread then returns a crash. For shutting down."""
        if self._pid:
            with contextlib.suppress(ServerLost):
                self._server.kill(self._pid)

    def stop(self) -> None:
        """End the process, if any; a later `run` starts another."""
        if self._socket is not None:
            with contextlib.suppress(ServerLost):           # then it has died with the server
                self._bury()

    def close(self) -> None:
        """`stop`, and give up the log. Idempotent."""
        self.stop()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _start(self, cpus: tuple[int, ...]) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._pid = self._server.start_child(theirs, self._log, cpus)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket, self._cpus, self._setup = ours, cpus, ""
        self.starts += 1

    def _bury(self) -> int | None:
        """Kill and reap: the wait status, or None if it is still dying."""
        sock, pid = self._socket, self._pid
        self._socket, self._pid, self._setup = None, 0, ""
        if sock is not None:
            sock.close()
        return self._server.reap(pid)

    def _set_up(self, call: Request) -> Outcome | None:
        """Make the state of `call` in the process. None, or the outcome its items get."""
        count, outcome = self._failures.get(call.setup_key, (0, None))
        if outcome is None or count < MAX_SETUP_FAILURES:
            outcome = self._exchange("setup", call.job, self._server.config.setup_deadline, call.setup)
            if outcome.ok:
                self._setup = call.setup_key
                return None
            outcome = Outcome(outcome.status, None, outcome.kind, f"in the setup of {call.job}: {outcome.message}", outcome.seconds)
            self._setup = ""
            self._failures[call.setup_key] = (count + 1, outcome)
        return outcome

    def _exchange(self, kind: str, job: str, deadline: float, payload: bytes) -> Outcome:
        sock = self._socket
        assert sock is not None
        if os.fstat(self._log).st_size:
            os.ftruncate(self._log, 0)      # so that the end of the log belongs to this item
        frame = encode((kind, job, deadline, payload))
        started = time.monotonic()
        until = started + deadline
        try:
            sock.settimeout(deadline)
            send_frame(sock, frame)
            reply = decode(receive_frame(sock, until))
            if reply[0] == "ok" and len(reply) == 3:
                return Outcome("ok", reply[1], seconds=reply[2])
            if reply[0] == "error" and len(reply) == 4:
                return Outcome("error", None, reply[1], reply[2], reply[3])
            raise FormatError(f"an answer of an unknown form: {reply!r:.200}")
        except TimeoutError:
            seconds = time.monotonic() - started
            self._bury()
            return Outcome("timeout", None, "deadline", f"no result within {deadline:.3g} s", seconds)
        except FormatError as e:            # its memory is damaged: nothing it says can be believed
            seconds = time.monotonic() - started
            self._bury()
            return Outcome("crash", None, "protocol", str(e), seconds)
        except (EOFError, ConnectionError):
            seconds = time.monotonic() - started
            return self._crash(self._bury(), seconds, deadline)

    def _crash(self, status: int | None, seconds: float, deadline: float) -> Outcome:
        tail = read_log(self._log)
        if status is None:
            return Outcome("crash", None, "unknown", tail, seconds)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            kind = "step" if seconds < deadline else "deadline"
            return Outcome("timeout", None, kind, f"ended after {seconds:.3g} s by a limit inside the job", seconds)
        return Outcome("crash", None, signal.Signals(-code).name if code < 0 else f"exit {code}", tail, seconds)
