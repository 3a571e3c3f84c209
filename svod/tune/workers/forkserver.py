"""A process that forks children on request: numpy, LLVM and svod are imported once, a child costs about 10 ms.

    searching process ──(requests)──▶ fork server ──fork──▶ child ◀──(socket)──▶ searching process

multiprocessing's fork server is not used: it is a singleton that the user's program may be using, it imports the user's `__main__` into
every child, and it starts a resource tracker. This one never imports the user's script, which may have no guard around its main part.

No process outlives the searching process. The server ends when its request socket closes, also after SIGKILL, and kills its children
first. A child gets SIGKILL from the operating system when the server dies (Linux), and ends when its own socket closes. Both ignore
Ctrl-C: the searching process decides. The server never runs candidates, so it always answers.
"""
from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import threading
from dataclasses import asdict
from typing import Any

from svod.errors import TuneError
from svod.system.process.directories import anonymous_file
from svod.system.process.program import package_roots, python, why_no_python
from svod.system.process.signals import interrupt_blocked
from svod.system.process.streams import above_standard
from svod.tune.workers.jobs import WorkerConfig, identity, mismatch

CLOSED_DESCRIPTOR = -1    # stands for the descriptor of a file that was closed
START_DEADLINE = 300.0    # seconds within which the server has to report that it is ready, also with a cold disk and on a very busy machine
REQUEST_DEADLINE = 15.0   # seconds for one request; a fork takes milliseconds
CLOSE_DEADLINE = 2.0      # seconds that a server has to end before it is killed
REAP_DEADLINE = 5.0       # seconds that a killed process may take to end, as it may have gigabytes to unmap

# BLAS must not start threads in a process that forks, so this comes before any import of numpy.
_BOOT = ("import os, sys, json; os.environ.update(OPENBLAS_NUM_THREADS='1', MKL_NUM_THREADS='1', OMP_NUM_THREADS='1'); "
         "c = json.loads(sys.argv[2]); sys.path[:0] = c['first']; sys.path += c['last']; "
         "from svod.tune.workers.server_main import serve; serve(int(sys.argv[1]), c['config'])")


class ServerLost(Exception):
    """The fork server is gone or does not answer. No candidate is to blame: the items that its children had may run again."""


def _command(fd: int, config: WorkerConfig) -> list[str]:
    roots = package_roots()
    paths = {"first": [*roots[:1], *config.paths], "last": roots[1:], "config": asdict(config)}
    return [python(), "-P", "-W", "ignore", "-c", _BOOT, str(fd), json.dumps(paths)]


def _popen(command: list[str], fd: int, log: int) -> subprocess.Popen[bytes]:
    """Start a Python process that never sees a Ctrl-C: SIGINT is blocked until the process ignores it."""
    try:
        with interrupt_blocked():
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(fd,))
    except OSError as e:
        raise TuneError(f"cannot start a worker process: {e}") from e


def open_log() -> int:
    """Create an anonymous file for the output of a process, in memory if the system supports that. Returns its descriptor, opened for
    appending."""
    fd = above_standard(anonymous_file("svod-worker"))
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, neither of which has the number of a standard stream. The second is for another process and is set to
    blocking mode: under gevent new sockets are non-blocking."""
    ours, theirs = (socket.socket(fileno=above_standard(s.detach())) for s in socket.socketpair())
    os.set_blocking(theirs.fileno(), True)
    return ours, theirs


def read_log(fd: int, limit: int = 2000) -> str:
    """The last `limit` bytes written to a log."""
    size = os.fstat(fd).st_size
    return os.pread(fd, limit, max(0, size - limit)).decode(errors="replace").strip()


class ForkServer:
    """The searching process's end of the fork server. Thread-safe.

    The constructor does not wait for the server; the first request does. Methods raise TuneError when the server cannot start, ServerLost
    when it is gone."""

    def __init__(self, config: WorkerConfig) -> None:
        if why := why_no_python():
            raise TuneError(f"cannot start workers: {why}; BEAM_EXECUTOR=inline searches without them, unprotected")
        self.config = config
        self._lock = threading.Lock()
        self._log = open_log()
        self._socket, theirs = socket_pair()
        self._socket.settimeout(START_DEADLINE)
        self._buffer = b""
        self._ready = False
        self._broken = ""
        try:
            self._process = _popen(_command(theirs.fileno(), config), theirs.fileno(), self._log)
        except TuneError:
            self._socket.close()
            os.close(self._log)
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, seconds: float = START_DEADLINE) -> None:
        """Wait for the server's first message, which says that it is ready. Raises TuneError where it does not come within `seconds`."""
        with self._lock:
            if not self._ready:
                self._socket.settimeout(max(0.1, min(seconds, START_DEADLINE)))
            self._await_hello()

    def abort(self) -> None:
        """Kill the server, whatever it does. The operating system ends its children with it, and requests that wait raise ServerLost."""
        self._process.kill()

    def _await_hello(self) -> None:
        if self._ready:
            return
        if self._broken:
            raise TuneError(self._broken)
        try:
            hello = self._read_line()
        except ServerLost as e:
            self.abort()
            hello = {"error": f"{e}; {read_log(self._log)}"}
        different = "" if "error" in hello else mismatch(identity(), hello["ready"])
        if different:
            self.abort()
            hello = {"error": f"they would be another svod ({different}), as its files have changed since this program began: start the "
                              "program again"}
        if "error" in hello:
            self._broken = f"worker processes could not start: {hello['error']}"
            raise TuneError(self._broken)
        self._socket.settimeout(REQUEST_DEADLINE)
        self._ready = True

    def _read_line(self) -> dict[str, Any]:
        try:
            while b"\n" not in self._buffer:
                chunk = self._socket.recv(65536)
                if not chunk:
                    raise ServerLost("the fork server ended")
                self._buffer += chunk
        except OSError as e:
            self.abort()        # the server may only be suspended: kill it, so that no later request waits for it
            raise ServerLost(f"the fork server does not answer: {e}") from e
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _request(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._await_hello()
            try:
                if fds:
                    socket.send_fds(self._socket, [data], fds)
                else:
                    self._socket.sendall(data)
            except OSError as e:
                raise ServerLost(f"the fork server is gone: {e}") from e
            return self._read_line()

    def start_child(self, sock: socket.socket, log: int) -> int:
        """Fork a child that serves `sock` and logs to the descriptor `log`. Returns its process id."""
        reply = self._request({"do": "fork"}, (sock.fileno(), log))
        if "error" in reply:
            raise ServerLost(f"the fork server cannot fork: {reply['error']}")
        return int(reply["pid"])

    def kill(self, pid: int) -> None:
        """Send SIGKILL to a child, without waiting. Ids are not reused meanwhile: only the server reaps, and only on request."""
        self._request({"do": "kill", "pid": pid})

    def reap(self, pid: int) -> int | None:
        """Send SIGKILL to a child and wait for its end. Returns its wait status, or None when it has not ended after REAP_DEADLINE seconds.
        A child that was already dying keeps the status of what killed it."""
        status = self._request({"do": "reap", "pid": pid})["status"]
        return None if status is None else int(status)

    def close(self) -> None:
        """End the server and all its children, and wait until the server is gone. Idempotent."""
        self._socket.close()
        try:
            self._process.wait(CLOSE_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log != CLOSED_DESCRIPTOR:
            os.close(self._log)
            self._log = CLOSED_DESCRIPTOR
