"""The executor on Ray: an embedded Ray, the one that the user's program has started, or a cluster.

Ray only transports items: it retries nothing, `ray.cancel` is not used (it has no effect on an actor that computes), and each actor has one
call in flight. The child processes inside the actors keep the deadlines. An actor that does not answer long after them is killed and
replaced.

An embedded Ray (`address=None`) listens on the loopback interface and asks for a token that only this process and its workers know. Its
session has a directory of its own, which is removed at the end. It ignores RAY_ADDRESS and any cluster on this machine. A Ray that the
program has initialised before is used as it is and left running. Ray's own threads print; while the executor is open their output is kept
off this process's stdout and stderr.
"""
from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from svod import config
from svod.core.machine.target import Target, unfit
from svod.errors import TuneError
from svod.system.process.cores import usable_cores
from svod.system.process.directories import kept_folder, temporary_places
from svod.system.process.program import package_roots
from svod.system.process.system_files import processes_of
from svod.tune.workers.child import Request
from svod.tune.workers.dispatching import DispatchingExecutor
from svod.tune.workers.executor import YIELD_SECONDS, Kind
from svod.tune.workers.fleet import WorkerLost
from svod.tune.workers.jobs import Outcome, WorkerConfig, identity, machine_name, mismatch
from svod.tune.workers.ray_worker import RayWorker

log = logging.getLogger("svod.tune")

OBJECT_STORE = 80 << 20     # bytes; Ray's minimum is 78,643,200. It is mapped lazily, and svod's messages do not use it
SESSION_PREFIX = "svod-ray-"
OWNER = "owner"             # the file in a session's directory that the owner of the session keeps locked
MAX_TEMP = 40               # longest path of a temporary directory: Ray's socket paths stay under the system's limit of 107
OUTER_GRACE = 15.0          # an actor that has not answered this many seconds after the deadlines of all its items is killed
ITEMS_PER_CALL = 4                   # most compile items in one call of an actor, as each call costs both processes about a millisecond
LOCK_SLICE = 1.0            # seconds of one wait for the machine lock inside an actor
MAX_START_FAILURES = 3      # a carrier is given up once this many of its actors in a row have died before their first answer
NODE_POLL = 1.0             # seconds between looks at the cluster's nodes
PENDING_NOTICE = 10.0       # seconds that an actor waits for a place on a node before a message says so
PLACE_SECONDS = 60.0        # seconds for a cluster to start the first worker of a kind, or a new one when the last is lost
BENCH = "bench"             # name of the Ray resource that marks the nodes on which programs may be timed; any amount of it
BENCH_SHARE = 0.001         # units of BENCH that a bench worker takes; tiny, as the machine lock lets one worker of a machine time at once
DISCONNECT_SECONDS = 15.0    # seconds for the connection to a cluster to end
OWN_LEAVE_SECONDS = 4.0     # seconds for an embedded Ray to stop before its processes are killed
HEAD_SECONDS = 20.0         # seconds without an answer of the head after which a cluster is given up: after 60 s Ray ends this process
PROBE_SECONDS = 2.0         # time limit of one attempt to reach the head

# One token for every Ray that this process starts: Ray's core reads it once and keeps it.
TOKEN = secrets.token_hex(32)


class RayUnavailable(Exception):
    """Ray is missing or did not start; the text has the reason."""


# -- Ray's output and files --------------------------------------------------------------------------
class _WithoutRay:
    """A text stream that drops the output of Ray's own threads and passes everything else on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            log.debug("ray: %s", text.rstrip())
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _QuietStreams:
    """Replaces stdout and stderr by `_WithoutRay`. `restore` puts the old streams back, unless others have replaced them since."""

    def __init__(self) -> None:
        self._before = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._ours: dict[str, Any] = {name: _WithoutRay(s) for name, s in self._before.items() if s is not None}
        for name, stream in self._ours.items():
            setattr(sys, name, stream)

    def restore(self) -> None:
        for name, stream in self._ours.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, self._before[name])


def _import_ray() -> Any:
    if "ray" not in sys.modules:
        # Ray reads the mode once, at import, and then refuses servers in another mode. If the program has imported Ray, ray.init sets it
        config.set_default_environment(RAY_AUTH_MODE="token")
    config.set_default_environment(RAY_COLOR_PREFIX="0", RAY_USAGE_STATS_ENABLED="0")
    try:
        import ray
    except ImportError as e:
        raise RayUnavailable(f"Ray cannot be imported ({e}); pip install 'svod[tune]'") from e
    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


class _SessionDirectory:
    """A directory with a short path for Ray's sockets and logs. Its owner locks a file in it, so that later processes can recognise and
    remove the directories of processes that were killed. That file is removed last: files that are left after a Ctrl-C, or that a process
    of Ray's wrote meanwhile, are then removed by a later process as well."""

    def __init__(self) -> None:
        self.path = ""
        for base in temporary_places():
            if len(base) <= MAX_TEMP:
                _remove_dead_sessions(Path(base))
                self.path = str(kept_folder(SESSION_PREFIX, Path(base)))
                # the file is locked before it gets its name: another process would take an unlocked one for a dead owner's
                unnamed = os.path.join(self.path, OWNER + ".new")
                self._owner = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(unnamed, os.path.join(self.path, OWNER))
                return
        raise RayUnavailable(f"Ray needs a writable temporary directory with a path of at most {MAX_TEMP} characters, and there is "
                             f"{', '.join(temporary_places()) or 'none'}; set TMPDIR")

    def remove(self) -> None:
        with contextlib.suppress(OSError):              # another process removes files that are left, and may be doing so already
            for _ in range(40):                         # a process of Ray's may still write its last log line
                if _remove_session(Path(self.path)):
                    break
                time.sleep(0.05)
        os.close(self._owner)


def _remove_session(directory: Path) -> bool:
    """Remove a session directory, its owner's file last. Returns whether it is gone."""
    for entry in os.listdir(directory):
        path = directory / entry
        if entry != OWNER:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    if os.listdir(directory) != [OWNER]:
        return False
    (directory / OWNER).unlink()
    try:
        directory.rmdir()
    except OSError:     # a new file appeared: the owner's file is needed again, so that the next process recognises the directory
        (directory / OWNER).touch(0o600)
        return False
    return True


def _remove_dead_sessions(base: Path) -> None:
    for directory in base.glob(SESSION_PREFIX + "*"):
        try:
            owner = os.open(directory / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:     # the directory belongs to another user, or is being made or removed
            continue
        with contextlib.suppress(OSError):      # its owner lives, or another process removes it as well
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_session(directory)
        os.close(owner)


class _EmbeddedRay:
    """A Ray that is started and stopped with the executor."""

    def __init__(self, ray: Any, workers: int, deadline: float) -> None:
        self._ray = ray
        self._directory = _SessionDirectory()
        self._error: BaseException | None = None
        self._environment = contextlib.ExitStack()
        self._environment.enter_context(config.default_environment(RAY_AUTH_TOKEN=TOKEN, RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE="1"))
        self._up = threading.Event()
        self._over = threading.Event()
        self._gone = threading.Event()
        # In a thread: init has no timeout, and only in the main thread it replaces the program's SIGTERM handler. The thread lives until
        # the end because the operating system kills Ray's processes together with the thread that started them.
        threading.Thread(target=self._live, args=(workers,), name="ray_start", daemon=True).start()
        if not self._up.wait(deadline):
            self._over.set()
            raise RayUnavailable(f"Ray was not up after {deadline:g} s")
        if self._error is not None:
            self.close()
            raise RayUnavailable(f"Ray did not start: {type(self._error).__name__}: {self._error}") from self._error

    def _live(self, workers: int) -> None:
        """Start Ray, wait until `close` is called, then stop Ray. The body of a thread."""
        self._start(workers)
        self._up.set()
        self._over.wait()
        with contextlib.suppress(Exception):    # Ray may have failed before; its processes end with this thread
            self._ray.shutdown()
        self._environment.close()
        self._directory.remove()
        self._gone.set()

    def _start(self, workers: int) -> None:
        # Ray's workers import svod from where this process imports it
        paths = os.pathsep.join([*package_roots()[:1], *filter(None, [config.child_environment().get("PYTHONPATH")])])
        try:
            # Ray would point breakpoint() of this process, and of every process it starts later, to its own debugger
            with config.changed_environment(PYTHONPATH=paths), config.default_environment(PYTHONBREAKPOINT=""):
                self._ray.init(address="local", num_cpus=workers, include_dashboard=False, object_store_memory=OBJECT_STORE,
                               log_to_driver=False, logging_level=logging.ERROR, _temp_dir=self._directory.path,
                               _node_ip_address="127.0.0.1",
                               _system_config={"worker_niceness": 0, "enable_metrics_collection": False,
                                               "prestart_worker_first_driver": False})
        except BaseException as e:  # handed to the thread that waits
            self._error = e

    def close(self) -> None:
        """Stop Ray, remove its session's directory, and wait until both are done. Ray's processes that do not end in time are killed."""
        self._over.set()
        if not self._gone.wait(OWN_LEAVE_SECONDS):
            for pid in processes_of(self._directory.path):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._gone.wait(1.0)


# -- carrying ----------------------------------------------------------------------------------------
class _RayCarrier:
    """Runs requests in an actor. The actor is started early, in parallel with the actors of other carriers, and replaced when it dies."""

    def __init__(self, owner: RayExecutor, kind: Kind, name: str) -> None:
        self.kind: Kind = kind
        self.name = name
        self.chunk = ITEMS_PER_CALL if kind == "compile" else 1
        self._owner = owner
        self._ray = owner.ray
        self._actor: Any = None
        self._failures = 0
        self._hopeless: TuneError | None = None     # why another attempt to start would fail as well
        self._locked = False
        # time at which the carrier's last worker was lost; before the first worker, the time of the carrier's creation
        self._lost = time.monotonic()
        self.node: str | None = None                # id of the cluster node that this worker runs on
        self.host, self.cores = "", usable_cores()
        self.target: Target | None = None

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        ray = self._ray
        try:
            actor = self._actor
            if actor is None:
                raise WorkerLost("it was ended")
            if self.kind == "bench" and not self._locked:
                self._await_lock(actor)
            setups = len({c.setup_key for c in requests if c.setup_key})
            patience = OUTER_GRACE + sum(c.deadline for c in requests) + setups * self._owner.config.setup_deadline
            if self.kind == "compile":
                patience += YIELD_SECONDS * len(requests)
            outcomes: list[Outcome] = ray.get(actor.run.remote(list(requests)), timeout=patience)
        except ray.exceptions.GetTimeoutError as e:
            self._drop()
            raise WorkerLost("the worker did not answer long after every deadline") from e
        except ray.exceptions.RayTaskError as e:
            self._drop()
            raise WorkerLost(f"a worker failed by itself: {e.cause}") from e
        except ray.exceptions.RayError as e:
            self._drop()
            raise WorkerLost(_first_line(e)) from e
        for outcome in outcomes:
            if outcome.status == "lost":
                raise WorkerLost(outcome.message)
        return outcomes

    def start(self) -> Any:
        """Start the actor if there is none, and check its identity. Returns it. Raises WorkerLost, or TuneError when another attempt
        would fail."""
        return self._actor if self._actor is not None else self._start()

    def _start(self) -> Any:
        if self._hopeless is not None:
            raise self._hopeless
        if self._failures >= MAX_START_FAILURES:
            raise TuneError(f"{self._failures} workers in a row could not be started")
        ray = self._ray
        if not self._owner.embedded:
            self._await_node()
        try:
            owner, times = self._owner, self.kind == "bench"
            self._actor = ray.remote(**owner.options(self))(RayWorker).remote(owner.config, owner.device, times, owner.yields)
            theirs = self._await(self._actor.hello.remote())
            self._check_version(theirs)
            self._await(self._actor.wait_until_ready.remote())
        except ray.exceptions.RayTaskError as e:
            self._drop()
            self._hopeless = TuneError(f"a worker cannot work: {e.cause}")
            raise self._hopeless from e
        except ray.exceptions.ActorUnschedulableError as e:
            self._drop()
            self._owner.look_at_nodes()     # the actor's node has left the cluster
            raise WorkerLost(_first_line(e)) from e
        except ray.exceptions.RayError as e:
            self._failures += 1
            self._drop()
            raise WorkerLost(_first_line(e)) from e
        if self.kind == "bench" and not self._owner.embedded:
            self.target = ray.get(self._actor.target.remote(), timeout=OUTER_GRACE)
        self._failures = 0
        self.host, self.cores = "" if theirs["machine"] == machine_name() else theirs["machine"], int(theirs["cores"])
        return self._actor

    def _check_version(self, theirs: dict[str, str]) -> None:
        """Drop the actor and raise TuneError if it runs another version of svod. `theirs`: the actor's identity."""
        if different := mismatch(identity(), theirs):
            self._drop()
            todo = "start this program again" if self._owner.embedded else "install the same version on every node"
            self._hopeless = TuneError(f"the worker on {theirs['host']} is another svod: {different}; {todo}")
            raise self._hopeless

    def _await_node(self) -> None:
        """Wait until a node has a free place for this worker. Raises TuneError where there is none in time."""
        while not self._owner.take_place(self):
            if self._owner.closing:
                raise WorkerLost("closing")
            if time.monotonic() - self._lost > self._owner.patience:
                raise TuneError(f"the cluster has had no free place for a worker that can {self.kind} for {self._owner.patience:g} s")
            time.sleep(NODE_POLL / 2)

    def _await(self, ref: Any) -> Any:
        """Wait for the value of the Ray reference `ref`. Its actor may have to wait for a place in the cluster: without limit while other
        workers of its kind are up, else for `patience` seconds. Raises TuneError after that."""
        notice = time.monotonic() + PENDING_NOTICE
        while not self._ray.wait([ref], timeout=0.5)[0]:
            if self._owner.closing:
                raise WorkerLost("closing")
            if self._owner.without_worker(self.kind) > self._owner.patience:
                self._drop()
                raise TuneError(f"no worker that can {self.kind} has come up for {self._owner.patience:g} s" + (
                    "" if self._owner.embedded else "; the cluster has no free place for it, or does not answer"))
            if time.monotonic() > notice and not self._owner.embedded:      # actors of an embedded Ray need no place
                log.warning("%s is waiting for a place in the Ray cluster", self.name)
                notice = float("inf")
        return self._ray.get(ref)

    def _await_lock(self, actor: Any) -> None:
        waited = 0.0
        while not self._ray.get(actor.acquire.remote(LOCK_SLICE), timeout=LOCK_SLICE + OUTER_GRACE):
            if self._owner.closing:
                raise WorkerLost("closing")
            if not waited:
                what = f"{self._owner.device} of {self.host or 'this machine'}"
                config.log_once(log, logging.WARNING, f"waiting to time on {what}: another svod process is timing there")
            waited += LOCK_SLICE
        self._locked = True

    def idle(self) -> None:
        if self._locked:
            self._locked = False
            with contextlib.suppress(self._ray.exceptions.RayError):    # the actor is dead, and its lock released
                self._ray.get(self._actor.release.remote(), timeout=OUTER_GRACE)

    def interrupt(self) -> None:
        actor = self._actor
        if actor is not None and not self._owner.abandoned:     # when the head is gone, Ray would try to connect again
            with contextlib.suppress(Exception):    # the actor or Ray may be gone
                self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        self.interrupt()
        if self._actor is not None:
            self._lost = time.monotonic()
        self._actor, self._locked = None, False


class RayExecutor(DispatchingExecutor):
    """The executor that runs items in Ray actors, on this machine or in a cluster. It is made by `start_ray_executor`."""

    def __init__(self, ray: Any, description: str, count: int | None, embedded: _EmbeddedRay | None, connected: bool, quiet: _QuietStreams,
                 config: WorkerConfig, device: str, shared_cores: bool | None, start_deadline: float) -> None:
        super().__init__(description, shared_cores)
        self.patience = start_deadline if embedded is not None else max(start_deadline, PLACE_SECONDS)
        self.ray = ray
        self.config = config
        self.device = device
        self._embedded = embedded
        self._connected = connected         # this executor called ray.init for a cluster, and disconnects at the end
        self._quiet = quiet
        self._count = count
        self._stop_watching = threading.Event()
        self._added: dict[Kind, int] = {"compile": 0, "bench": 0}
        self._carriers: list[_RayCarrier] = []
        self._nodes: list[dict[str, Any]] = []
        self.look_at_nodes()
        self._placing = threading.Lock()        # held while workers choose their nodes
        self._is_offered = False                # whether a node has ever had the resource BENCH
        self._grow()
        self._watcher = threading.Thread(target=self._watch_nodes, name="svod-ray-nodes", daemon=True)
        if embedded is None:
            self._watcher.start()

    def _add_carrier(self, kind: Kind) -> None:
        carrier = _RayCarrier(self, kind, f"ray-{kind}-{self._added[kind]}")
        self._added[kind] += 1
        self._carriers.append(carrier)
        self._add(carrier)

    def _grow(self) -> None:
        """Add workers for the free places: compile workers, as many as were asked for or else one per core, and one bench worker for each
        node that times."""
        kinds: tuple[Kind, ...] = ("compile", "bench")
        for kind in kinds:
            with self._placing:
                free = sum(max(0, n) for n in self._free_places(kind).values())
                without_node = [c for c in self._of_kind(kind) if c.node not in self._places(kind) and c.name not in self._fleet.aside]
            wanted = free - len(without_node)
            if kind == "compile" and self._count is not None:
                wanted = self._count - self.workers(kind)
            for _ in range(1 - self.workers(kind) if self.embedded and kind == "bench" else wanted):
                self._add_carrier(kind)

    def _of_kind(self, kind: Kind) -> list[_RayCarrier]:
        return [c for c in self._carriers if c.kind == kind]

    def _places(self, kind: Kind) -> dict[str, int]:
        """Node id → the number of workers of a kind that it has places for. A bench worker has one place on each node with the resource
        BENCH; if no node ever had it, on this process's node."""
        alive = {n["NodeID"]: n["Resources"] for n in self._nodes if n["Alive"]}
        if kind == "compile":
            return {node: int(has["CPU"]) for node, has in alive.items() if has.get("CPU", 0) >= 1}
        self._is_offered = self._is_offered or any(n["Resources"].get(BENCH, 0) for n in self._nodes)
        if self._is_offered:
            return {node: 1 for node, has in alive.items() if has.get(BENCH, 0)}
        return {self.ray.get_runtime_context().get_node_id(): 1}

    def _free_places(self, kind: Kind) -> Counter[str | None]:
        """Node id → the number of places that no worker of this executor has. A worker that was set aside keeps its place, as another one
        would fail there as well."""
        free: Counter[str | None] = Counter(self._places(kind))
        free.subtract(c.node for c in self._of_kind(kind) if c.node in free)
        return free

    def take_place(self, carrier: _RayCarrier) -> bool:
        """Give a worker a node: its former node if that is still there, else the node with the most free places. False if there is none."""
        with self._placing:
            if carrier.node in self._places(carrier.kind):
                return True
            carrier.node = next((node for node, free in self._free_places(carrier.kind).most_common(1) if free > 0), None)
            return carrier.node is not None

    def targets(self) -> list[Target]:
        """The targets of the bench workers, after waiting at most `patience` seconds for workers whose target is not known yet."""
        if self.embedded:
            return super().targets()
        end = time.monotonic() + self.patience
        benches = self._of_kind("bench")
        while any(c.target is None and c.name not in self._fleet.aside for c in benches) and time.monotonic() < end:
            time.sleep(0.05)
        present = self._places("bench")     # checked, as an idle worker does not notice that its node has left
        return list({c.target.key: c.target for c in benches
                     if c.target is not None and c.name not in self._fleet.aside and c.node in present}.values())

    def look_at_nodes(self) -> None:
        """Update the list of the cluster's nodes. Raises Ray's errors where the head is gone."""
        self._nodes = self.ray.nodes()

    def _watch_nodes(self) -> None:
        known = self._hosts()
        head, heard = self.ray.get_runtime_context().gcs_address, time.monotonic()
        while not self._stop_watching.wait(NODE_POLL):
            if not _listens(head):          # tested first, as a request to Ray would wait for a minute
                if time.monotonic() - heard > HEAD_SECONDS:
                    self._abandon(f"the head of the Ray cluster at {head} has not answered for {HEAD_SECONDS:g} s")
                    return
                continue
            heard = time.monotonic()
            try:
                self.look_at_nodes()
            except Exception as e:  # Ray raises several unrelated types when the head is gone; calls report it too
                log.warning("the Ray cluster does not answer: %s", _first_line(e))
                continue
            alive = self._hosts()
            for node in alive.keys() - known.keys():
                log.info("node %s (%s) joined", alive[node], node[:8])
            for node in known.keys() - alive.keys():
                log.warning("the node %s (%s) has left the cluster%s", known[node], node[:8], self._lost_with(node))
            if alive.keys() - known.keys():
                self._grow()
            known = alive

    def _hosts(self) -> dict[str, str]:
        """Node id → the name of its machine, for the nodes that are alive."""
        return {n["NodeID"]: n.get("NodeManagerHostname", "?") for n in self._nodes if n["Alive"]}

    def _lost_with(self, node: str) -> str:
        """A clause that names the targets that cannot be timed without this node; "" if other nodes time them all."""
        there = self._places("bench")
        left = [c.target.key for c in self._of_kind("bench") if c.target is not None and c.node in there]
        lost = sorted({c.target.key for c in self._of_kind("bench") if c.node == node and c.target is not None
                       and all(unfit(key, c.target) is not None for key in left)})
        return f", and no other one times {', '.join(lost)}: its search waits {self.patience:g} s for another" if lost else ""

    def options(self, carrier: _RayCarrier) -> dict[str, Any]:
        """Options of an actor, without restarts and retries. In a cluster it runs on its carrier's node."""
        fixed: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0}
        if self._embedded is not None:
            return fixed
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        assert carrier.node is not None
        fixed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(carrier.node, soft=False)
        if carrier.kind == "compile":
            return {**fixed, "num_cpus": 1}
        if self._is_offered:
            fixed["resources"] = {BENCH: BENCH_SHARE}
        # the default niceness of Ray's workers is 15: with it one busy process makes a timing 31 times slower
        return {**fixed, "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}}}

    @property
    def embedded(self) -> bool:
        """Whether this executor has started Ray itself, on this machine only."""
        return self._embedded is not None

    def wait_until_ready(self, seconds: float = math.inf) -> None:
        """Wait for all workers of an embedded Ray, which start within two seconds and would disturb timings until then. In a cluster, which
        may take long to start all workers, wait only for the first compile worker."""
        end = time.monotonic() + seconds
        with self._changed.lock:
            while not self.closing and time.monotonic() < end:
                settled = self._fleet.up | self._fleet.aside.keys()
                if all(c.name in settled for c in self._carriers if self.embedded or c.kind == "compile"):
                    break
                if not self.embedded and self._fleet.is_any_up("compile"):
                    break
                self._changed.wait(NODE_POLL)
            needed: tuple[Kind, ...] = ("compile", "bench") if self.embedded else ("compile",)
            for kind in needed:
                if not self._fleet.is_any_up(kind):
                    why = [self._fleet.aside[c.name] for c in self._of_kind(kind) if c.name in self._fleet.aside]
                    missing = "they take too long" if self.embedded else "the cluster has no node with a core"
                    raise TuneError(f"no Ray worker that can {kind} has started: {why[-1] if why else missing}")

    def _shut_down(self) -> None:
        self._stop_watching.set()
        if self._watcher.is_alive():
            self._watcher.join(NODE_POLL + 5)
        if self._embedded is not None:
            self._embedded.close()
        elif self._connected:
            # only disconnects, in a thread: if the cluster's head is gone, this may hang
            leaving = threading.Thread(target=self.ray.shutdown, name="ray_disconnect", daemon=True)
            leaving.start()
            leaving.join(PROBE_SECONDS if self.abandoned else DISCONNECT_SECONDS)
        self._quiet.restore()


def _listens(address: str) -> bool:
    """Whether a server accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _first_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {next(iter(str(e).strip().splitlines()), '')}"


def knock(address: str, deadline: float = 5.0) -> None:
    """Raise RayUnavailable where nothing listens at the address of a cluster. "auto" is not checked."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=min(deadline, 5.0)).close()
    except (OSError, ValueError, OverflowError) as e:
        raise RayUnavailable(f"nobody answers there ({e}); is `ray start --head` running?") from e


def _connect(ray: Any, address: str, deadline: float) -> None:
    """Join the cluster at `address`. Raises RayUnavailable, after `deadline` seconds at the latest."""
    knock(address, deadline)        # Ray retries an address where nobody listens for minutes
    errors: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as e:  # ConnectionError, AuthenticationError, ValueError, RuntimeError: handed to the thread that waits
            errors.append(e)

    # in a thread: init has no timeout, and only in the main thread it replaces the program's SIGTERM handler
    thread = threading.Thread(target=init, name="ray_connect", daemon=True)
    thread.start()
    thread.join(deadline)
    if thread.is_alive():
        raise RayUnavailable(f"no connection after {deadline:g} s; is a Ray {ray.__version__} head there, and is its token the one of this "
                             "user (RAY_AUTH_MODE=token, ~/.ray/auth_token)?")
    if errors:
        raise RayUnavailable(_first_line(errors[0])) from errors[0]


def start_ray_executor(count: int | None, address: str | None, config: WorkerConfig | None, device: str, shared_cores: bool | None,
                       start_deadline: float) -> RayExecutor:
    """Start Ray (or connect to it) and return the executor once its first worker has answered.

    Raises RayUnavailable when Ray is missing or does not start in time, or its workers cannot run svod (another version, not installed)."""
    started = time.monotonic()
    ray = _import_ray()
    embedded: _EmbeddedRay | None = None
    connected = False
    quiet = _QuietStreams()
    executor: RayExecutor | None = None
    try:
        if ray.is_initialized():
            where = "the Ray already running in this process"
        elif address is None:
            count = count or usable_cores()
            embedded = _EmbeddedRay(ray, count, start_deadline)
            where = "an own Ray"
        else:
            where = f"the Ray cluster at {address}"
            _connect(ray, address, start_deadline)
            connected = True
        workers = f"{count} worker{'s' * (count != 1)}" if count else "workers"
        executor = RayExecutor(ray, f"{workers} on {where}", count, embedded, connected, quiet, config or WorkerConfig(), device,
                               shared_cores, start_deadline)
        executor.wait_until_ready(started + start_deadline - time.monotonic() if embedded is not None else math.inf)
    except BaseException as e:
        if executor is not None:
            executor.close()
        else:
            if embedded is not None:
                embedded.close()
            quiet.restore()
        if isinstance(e, (TuneError, RayUnavailable)):
            raise RayUnavailable(str(e)) from e
        raise
    log.info("%s, up after %.1f s", executor.description, time.monotonic() - started)
    return executor
