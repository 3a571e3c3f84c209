"""The process that compiles or times candidates, and its handle in the searching process.

`run_child` is the main loop of the process. `Child` is its handle in the searching process (or in a Ray actor): it starts the process when
there is work, kills it with SIGKILL at the deadline, replaces it, and turns everything that can happen into an `Outcome`.

    item ──encode──▶ [child: function(item, state)] ──encode──▶ Outcome("ok", value)
                       │ raises → "error"     │ dies → "crash"     │ still running at the deadline → "timeout"

The process has limits: no core files, a bound on writable memory and on the size of files, and a closed stdin. Its stdout and stderr go to
a log, whose end becomes the message of a crash. A candidate that hangs or crashes costs only itself and 10 ms: the rest of a batch runs in
a new process, which receives the setup again.
"""
from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from svod.errors import DeviceLost, FormatError
from svod.system.process.memory import usable_memory
from svod.system.process.signals import default
from svod.system.process.system_files import offer_to_end
from svod.tune.workers.forkserver import CLOSED_DESCRIPTOR, ForkServer, ServerLost, open_log, read_log, socket_pair
from svod.tune.workers.jobs import MAX_MESSAGE, Outcome, decode, encode, resolve_job

MESSAGE_HEADER = struct.Struct("<Q")
YOUNG_OBJECTS = 50_000      # new objects before a garbage collection: with Python's default, 700, collections take 1/4 of lowering's time
BACKSTOP = 5.0              # seconds after the deadline at which a child whose parent is gone or stopped kills itself
MAX_FILE = 32 << 20         # bytes a child may write to one file, its log included
MAX_SETUP_FAILURES = 2      # crashes or hangs after which a setup is not tried again
LOOK = 0.5                  # most seconds of one wait for an answer, which is repeated until the deadline
STOPPED = 3.0  # a wait that takes this many seconds more than it should shows that this process or its machine was stopped meanwhile

_child_deadline: float | None = None    # in a child, while an item runs: time.monotonic() at which the backstop fires


@dataclass(frozen=True, slots=True)
class Request:
    """One encoded item for a worker. `setup`: the encoded payload of the job's setup; `setup_key`: its digest, "" without a setup."""

    job: str
    item: bytes
    deadline: float             # seconds, from the start of the item on a ready worker
    setup: bytes = b""
    setup_key: str = ""


def make_request(job: str, item: Any, deadline: float, setup: Any = None) -> Request:
    """A Request of plain data. Raises FormatError when item or setup is not plain data."""
    payload = b"" if setup is None else encode(setup)
    return Request(job, encode(item), deadline, payload, setup_key(job, payload))


def setup_key(job: str, payload: bytes) -> str:
    """The name under which a worker keeps the state made from `payload`."""
    return blake2b(job.encode() + b"\0" + payload, digest_size=16).hexdigest() if payload else ""


class WasStopped(TimeoutError):
    """The error for an answer that did not come in time while this process was stopped, so that the item may have kept its deadline."""


def send_frame(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(MESSAGE_HEADER.pack(len(payload)))
    sock.sendall(payload)


def receive_frame(sock: socket.socket, until: float | None = None, asked: float | None = None) -> bytearray:
    """Receive a frame. Raises EOFError at the end, TimeoutError when time.monotonic() passes `until`, FormatError for a bad length,
    WasStopped where this process did not run for a while between `asked` (now when None), before the question was sent, and `until`."""
    (size,) = MESSAGE_HEADER.unpack(_receive(sock, MESSAGE_HEADER.size, until, asked))
    if size > MAX_MESSAGE + 4096:
        raise FormatError(f"a frame of {size} bytes; the limit is {MAX_MESSAGE}")
    return _receive(sock, size, until, None)


def _receive(sock: socket.socket, size: int, until: float | None, asked: float | None) -> bytearray:
    data = bytearray(size)
    view, have, stopped = memoryview(data), 0, 0.0
    looked = time.monotonic() if asked is None else asked
    while have < size:
        # after `until` a read does not wait, but a result that has already arrived still counts
        wait = None if until is None else min(LOOK, max(0.0, until - time.monotonic()))
        sock.settimeout(wait)
        try:
            n = sock.recv_into(view[have:])
        except (BlockingIOError, TimeoutError):
            n = -1
        now = time.monotonic()
        if wait is not None and now - looked > wait + STOPPED:
            stopped += now - looked
        looked = now    # measured from look to look, so that no stop is missed
        if n > 0:
            have += n
        elif n == 0 or (until is not None and now >= until):
            if stopped:
                raise WasStopped(f"this machine, or its workers, stood still for {stopped:.0f} s")
            raise EOFError("the other side closed") if n == 0 else TimeoutError("nothing arrived in time")
    return data


# -- inside the child ------------------------------------------------------------------------------
def run_child(fd: int, log: int, config: dict[str, Any]) -> None:
    """Serve items from the socket `fd` until it closes. `config`: the fields of WorkerConfig."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    if log > 2:
        os.close(log)
    faulthandler.enable(2)
    gc.set_threshold(YOUNG_OBJECTS)
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
                state = None        # freed before the new state is made: both may be large
                state = setup(item) if setup is not None else item
                answer = encode(("ok", None, time.perf_counter() - started))
            else:
                result = _result_of(run, item, state)
                seconds = time.perf_counter() - started
                answer = encode(("ok", result, seconds))
                del result
        except BaseException as e:  # any exception of a candidate becomes a record
            answer = encode(("error", type(e).__name__, _text_of(e), time.perf_counter() - started))
        _disarm()
        with contextlib.suppress(OSError, ValueError):     # the log is full, or a candidate closed the stream
            sys.stdout.flush()
        try:
            send_frame(sock, answer)
        except OSError:
            return


def _result_of(run: Callable[[Any, Any], Any], item: Any, state: Any) -> Any:
    """Run a job on an item and return its result. After a MemoryError garbage is collected, which earlier items may have left,
    and the job runs once more."""
    with contextlib.suppress(MemoryError):
        return run(item, state)
    gc.collect()
    return run(item, state)


def _text_of(e: BaseException) -> str:
    try:
        return str(e)[:20_000]
    except Exception:  # a __str__ that raises is a failure of the candidate too
        return "(its text cannot be made)"


def _limit_resources(config: dict[str, Any]) -> None:
    memory = config["memory_bytes"] or default_memory_limit()
    # RLIMIT_DATA counts private writable memory on Linux; RLIMIT_AS would also count what GPU drivers merely reserve
    for what, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, MAX_FILE)):
        _, hard = resource.getrlimit(what)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(OSError, ValueError):     # this system lacks the limit; the deadline still ends the process
            resource.setrlimit(what, (limit, hard))
    offer_to_end()      # when memory runs out, the system kills this process rather than the user's


def default_memory_limit() -> int:
    """Half of the memory of this machine or container, in bytes, at least 1 GiB."""
    return max(1 << 30, usable_memory() // 2)


def _arm(seconds: float) -> None:
    """Have the operating system end this process after `seconds`, even in native code that holds the GIL."""
    global _child_deadline
    _child_deadline = time.monotonic() + seconds
    default(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))


def _disarm() -> None:
    global _child_deadline
    _child_deadline = None
    signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def step_limit(seconds: float) -> Iterator[None]:
    """Inside a job: end the worker (outcome `timeout`, kind "step") if the body takes longer than `seconds` of wall time.

    This is a short limit for a part of an item whose own deadline is long, such as the first run of a kernel after seconds of making
    inputs. It is exact to a millisecond. It must be entered in the main thread, and has no effect in the `inline` executor, where it would
    end the user's process."""
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
    """The handle of a worker process, which is started when it is needed. Not thread-safe, except `interrupt`.

    `run` never raises for a failure of the candidate. It raises ServerLost when the fork server is gone, or when this machine was stopped
    beyond the deadline; the item may then run again. It raises TuneError when no process can be started at all. The deadline of an item
    does not include start, setup and waiting."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._log = open_log()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._setup = ""                                    # key of the setup the process holds
        self._failures: dict[str, tuple[int, Outcome]] = {}     # key of a setup that failed → number of failures, the last outcome
        self.starts = 0                                     # processes started so far

    @property
    def pid(self) -> int:
        """Process id, or 0 while there is no process."""
        return self._pid

    def run(self, request: Request) -> Outcome:
        """Run one item. Starts the process, and makes the state that the item needs, if that has not been done."""
        if self._socket is None:
            self._start()
        if request.setup_key and request.setup_key != self._setup:
            failed = self._set_up(request)
            if failed is not None:
                return failed
        return self._exchange("item", request.job, request.deadline, request.item)

    def interrupt(self) -> None:
        """Kill the process, for shutting down. `run` in another thread then returns a crash."""
        if self._pid:
            with contextlib.suppress(ServerLost):
                self._server.kill(self._pid)

    def stop(self) -> None:
        """End the process, if any. A later `run` starts another."""
        if self._socket is not None:
            with contextlib.suppress(ServerLost):           # without the server the process has ended as well
                self._bury()

    def close(self) -> None:
        """End the process and close the log. Idempotent."""
        self.stop()
        if self._log != CLOSED_DESCRIPTOR:
            os.close(self._log)
            self._log = CLOSED_DESCRIPTOR

    def _start(self) -> None:
        ours, theirs = socket_pair()
        try:
            self._pid = self._server.start_child(theirs, self._log)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket, self._setup = ours, ""
        self.starts += 1

    def _bury(self) -> int | None:
        """Kill and reap the process. Returns its wait status, or None if it is still dying."""
        sock, pid = self._socket, self._pid
        self._socket, self._pid, self._setup = None, 0, ""
        if sock is not None:
            sock.close()
        return self._server.reap(pid)

    def _set_up(self, request: Request) -> Outcome | None:
        """Make the state that `request` needs in the process. Returns None, or, where that fails, the outcome of all items that need
        this state."""
        count, outcome = self._failures.get(request.setup_key, (0, None))
        if outcome is None or count < MAX_SETUP_FAILURES:
            outcome = self._exchange("setup", request.job, self._server.config.setup_deadline, request.setup)
            if outcome.ok:
                self._setup = request.setup_key
                return None
            outcome = Outcome(outcome.status, None, outcome.kind, f"in the setup of {request.job}: {outcome.message}", outcome.seconds)
            self._setup = ""
            self._failures[request.setup_key] = (count + 1, outcome)
        return outcome

    def _exchange(self, kind: str, job: str, deadline: float, payload: bytes) -> Outcome:
        sock = self._socket
        assert sock is not None
        if os.fstat(self._log).st_size:
            os.ftruncate(self._log, 0)      # empty the log, so that its text is this item's alone
        frame = encode((kind, job, deadline, payload))
        started = time.monotonic()
        until = started + deadline
        try:
            sock.settimeout(deadline)
            send_frame(sock, frame)
            match decode(receive_frame(sock, until, started)):
                case ("ok", value, seconds):
                    return Outcome("ok", value, seconds=seconds)
                case ("error", kind, message, seconds):
                    if kind == DeviceLost.__name__:     # the device fails only for this process: a new one can use it
                        self._bury()
                    return Outcome("error", None, kind, message, seconds)
                case reply:
                    raise FormatError(f"an answer of an unknown form: {reply!r:.200}")
        except (TimeoutError, FormatError, EOFError, ConnectionError) as e:
            seconds = time.monotonic() - started
            status = self._bury()
            if isinstance(e, WasStopped):
                raise ServerLost(str(e)) from e
            if isinstance(e, TimeoutError):
                return Outcome("timeout", None, "deadline", f"no result within {deadline:.3g} s", seconds)
            if isinstance(e, FormatError):      # its memory is damaged: none of its messages can be trusted
                return Outcome("crash", None, "protocol", str(e), seconds)
            return self._crash(status, seconds, deadline)

    def _crash(self, status: int | None, seconds: float, deadline: float) -> Outcome:
        tail = read_log(self._log)
        if status is None:
            return Outcome("crash", None, "unknown", tail, seconds)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            kind = "step" if seconds < deadline else "deadline"
            return Outcome("timeout", None, kind, f"ended after {seconds:.3g} s by a limit inside the job", seconds)
        return Outcome("crash", None, signal.Signals(-code).name if code < 0 else f"exit {code}", tail, seconds)
