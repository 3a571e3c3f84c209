"""The main function of the fork server. `forkserver.py` is the searching process's side."""
from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from svod.system.process.signals import begin_as_worker
from svod.tune.workers.child import run_child
from svod.tune.workers.forkserver import REAP_DEADLINE
from svod.tune.workers.jobs import identity


def _preload(config: dict[str, Any]) -> None:
    for entry in config["preload"]:
        module, _, function = entry.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()


def serve(fd: int, config: dict[str, Any]) -> None:
    """The main function of the fork server: preload modules, report that it is ready, then fork, kill and reap on request until the
    other side closes."""
    begin_as_worker()
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)

    def reply(message: dict[str, Any]) -> None:
        control.sendall(json.dumps(message).encode() + b"\n")

    try:
        _preload(config)
        hello = {"ready": identity()}
    except Exception as e:  # any exception becomes a TuneError in the searching process
        reply({"error": f"{type(e).__name__}: {e}"})
        return
    gc.collect()
    gc.freeze()     # no collection writes to preloaded objects, so that their pages stay shared with the children
    children: set[int] = set()
    reply(hello)
    with contextlib.suppress(OSError):      # the other side ended in the middle of an answer
        _answer_requests(control, children, reply, config)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        _reap(pid, 1.0)


def _answer_requests(control: socket.socket, children: set[int], reply: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> None:
    server = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 65536, 2)
        if not data:
            return
        message = json.loads(data)      # one recv is one message: requests are small and answered one by one
        if message["do"] == "fork":
            try:
                pid = os.fork()
            except OSError as e:
                for f in fds:
                    os.close(f)
                reply({"error": str(e)})
                continue
            if pid == 0:
                _become_child(control, server, fds, config)
            for f in fds:
                os.close(f)
            children.add(pid)
            reply({"pid": pid})
        elif message["pid"] not in children:
            reply({"status": None})
        elif message["do"] == "kill":
            os.kill(message["pid"], signal.SIGKILL)
            reply({"status": None})
        else:
            os.kill(message["pid"], signal.SIGKILL)
            status = _reap(message["pid"], REAP_DEADLINE)
            if status is not None:
                children.discard(message["pid"])
            reply({"status": status})


def _reap(pid: int, deadline: float) -> int | None:
    end = time.monotonic() + deadline
    wait = 0.0002
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return status
        if time.monotonic() > end:
            return None
        select.select([], [], [], wait)
        wait = min(0.01, wait * 1.5)


def _become_child(control: socket.socket, server: int, fds: list[int], config: dict[str, Any]) -> None:
    """Serve as a child in the forked process. Never returns."""
    code = 1
    try:
        control.close()
        _die_with_parent(server)
        run_child(fds[0], fds[1], config)
        code = 0
    finally:
        os._exit(code)


def _die_with_parent(parent: int) -> None:
    """On Linux, have this process killed when its parent dies (prctl PR_SET_PDEATHSIG, 1). Elsewhere the server kills it at its own end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:      # the parent died before prctl
            os._exit(1)
