"""Runs libraries in separate processes: each prepares one case there, and is the only library in its process while it is timed.

    the benchmarks                       a child for each contestant of the case
    Order                         →      prepare the case, run it once
                                  ←      its outputs, kernels, seconds of preparation; or an error
    ("run", n)                    →      run it n times
    ("sample", n, warm)           →      untimed runs for `warm` seconds, then n timed ones
                                  ←      their seconds, by the child's own clock
    ("explain",)                  →      time its kernels one by one
                                  ←      a `results.KernelShare` for each
    Order                         →      drop the case, prepare the next one

All children of a case exist at the same time and wait for messages without using a core, so that rounds interleave as they do in one
process. If a child ends, hangs or sends an unexpected answer, only its own contestant fails. Children of small cases (`LASTING`) stay for
the next case, unless they failed or have had `MOST_ORDERS`; children of other cases end with their case.
"""
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from svod.bench.load import MachineLoad, watch_machine
from svod.bench.peers import PEER_LIBRARIES, Array, Peer, PreparedPeer
from svod.bench.placing import Place
from svod.bench.results import KernelInfo
from svod.bench.suites.cases import REFERENCE, Case
from svod.bench.suites.reference import Result
from svod.bench.timer import SPIN_DOWN_SECONDS, Clock, Contestant
from svod.config import PrepareConfig, environment_with_svod
from svod.errors import SvodError, UnsupportedError
from svod.system.process.program import python
from svod.system.process.streams import descriptor

CHILD = "svod.cli.bench.alone"          # the module that a child process runs; it belongs to the command line, a higher layer
PREPARE_SECONDS = 400.0         # most seconds for preparing a case, beside the budget of a search
RUN_SECONDS = 120.0             # most seconds until a run or a sample is answered
END_SECONDS = 5.0               # seconds in which a child may end by itself before it is killed
LASTING = ("blocks",)           # suites whose children stay for the next case
MOST_ORDERS = 200               # most cases of a child, as a library may keep memory for each


class AloneError(SvodError):
    """A child of the benchmarks failed."""


@dataclass(frozen=True)
class Order:
    """The task of a child: `contestant` is a library, or a name in `results.SVOD` with its configuration."""

    contestant: str
    case: str
    suite: str
    seed: int
    threads: int
    config: PrepareConfig | None = None


@dataclass(frozen=True)
class Done:
    """A child's answer to its order: the outputs of the first run, and the fields of a `PreparedPeer` that can be sent. `exact`: the
    outputs to compare with, if the first run's are not."""

    outputs: list[Array]
    remark: str
    identity: Hashable
    kernels: tuple[KernelInfo, ...]
    prepare_seconds: float | None
    search_seconds: float | None
    exact: list[Array] | None = None


class Process:
    """A child process and the pipe to it. Its methods raise AloneError if the child does not answer. `orders`: the number of cases it
    was given; `failed`: whether it ever failed to answer properly."""

    def __init__(self, name: str) -> None:
        self.name, self.orders, self.failed = name, 0, False
        own, other = Pipe()
        try:
            self._child = subprocess.Popen([python(), "-P", "-m", CHILD, str(other.fileno())], pass_fds=(other.fileno(),),
                                           env=environment_with_svod(), stdin=subprocess.DEVNULL, stdout=descriptor(sys.stderr))
        finally:
            other.close()
        self._pipe: Connection[Any, Any] = own
        self.id = self._child.pid

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a message to the child and return its answer. Raises AloneError after `seconds`."""
        self.orders += isinstance(message, Order)
        try:
            return self._answer(message, seconds)
        except AloneError:
            self.failed = True
            raise

    def _answer(self, message: Any, seconds: float) -> Any:
        try:
            self._pipe.send(message)
            if not self._pipe.poll(seconds):
                self.kill()
                raise AloneError(f"it took more than {seconds:.0f} s, and was ended")
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as e:
            code = self._child.wait(END_SECONDS)
            raise AloneError(f"its process ended with the status {code}") from e
        if kind == "unsupported":
            raise UnsupportedError(answer)
        if kind == "failed":
            raise AloneError(answer)
        return answer

    def kill(self) -> None:
        """Kill the child now."""
        self._child.kill()
        self._child.wait()

    def end(self) -> None:
        """Close the pipe, which makes the child end, and kill it if it does not end in time."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(END_SECONDS)
            return
        self.kill()


class RemoteContestant(Contestant):
    """A contestant in another process, which takes the samples itself."""

    process: Process

    def __init__(self, process: Process) -> None:
        super().__init__(lambda times: process.ask(("run", times), RUN_SECONDS), process.name)
        object.__setattr__(self, "process", process)

    def sample(self, repeats: int, warm: float | None, clock: Clock) -> float:
        """Take a sample as `Contestant.sample` does, by the clock of the other process."""
        seconds: float = self.process.ask(("sample", repeats, warm), RUN_SECONDS)
        return seconds


@dataclass
class Alone:
    """The child processes of a case, and those that wait for the next one. `config` has the configuration of each svod contestant, by
    name."""

    libraries: Sequence[str]
    config: dict[str, PrepareConfig]
    seed: int
    threads: int
    budget: float = 0.0                         # seconds that a search may take
    start: Callable[[str], Process] = Process
    _live: list[Process] = field(default_factory=list)
    _kept: dict[tuple[str, str], tuple[Process, Done]] = field(default_factory=dict)
    _waiting: dict[str, Process] = field(default_factory=dict)

    @contextmanager
    def entered(self, case: Case) -> Iterator[list[Peer]]:
        """Yield the contestants of a case that have processes: all of them, or, where the others share one, libraries that take no part
        in that. Their processes end with the context, or wait for the next case."""
        own = self.config if case.alone else ()
        try:
            yield [AlonePeer(self, name) for name in (*own, *(n for n in self.libraries if case.op in PEER_LIBRARIES[n].suites))]
        finally:
            for process in self._live:
                if case.suite in LASTING and not process.failed and process.orders < MOST_ORDERS and process.name not in self._waiting:
                    self._waiting[process.name] = process
                else:
                    process.end()
            self._live.clear()
            self._kept.clear()

    def close(self) -> None:
        """End the processes that wait for a case."""
        while self._waiting:
            self._waiting.popitem()[1].end()

    def reference(self, case: Case, operands: Sequence[Array]) -> Result:
        """The outputs of the library that serves as reference. Its process is kept, because it may be a contestant as well."""
        name = REFERENCE[case.op]
        try:
            self._kept[name, case.name] = found = self.prepared(name, case)
        except AloneError as e:
            raise AloneError(f"{name}, with which the others are compared: {e}") from e
        done = found[1]
        return done.outputs if done.exact is None else done.exact

    def prepared(self, name: str, case: Case) -> tuple[Process, Done]:
        """A process that has prepared a case, and its answer. Raises UnsupportedError or AloneError."""
        if (name, case.name) in self._kept:
            return self._kept.pop((name, case.name))
        process = self._waiting.pop(name, None) or self.start(name)
        self._live.append(process)
        order = Order(name, case.name, case.suite, self.seed, self.threads, self.config.get(name))
        done = process.ask(order, PREPARE_SECONDS + self.budget)
        return process, done

    def watch(self) -> Callable[[], MachineLoad]:
        """Measure the load of the machine by other processes than these: the returned function tells the load since this call."""
        return watch_machine([p.id for p in self._live])

    def pause(self) -> None:
        """Wait until idle threads stop spinning."""
        time.sleep(max([SPIN_DOWN_SECONDS, *(PEER_LIBRARIES[p.name].spin_seconds for p in self._live if p.name in PEER_LIBRARIES)]))

    @property
    def place(self) -> Place:
        """A placement function that does nothing: in each process, the library decides where its threads run."""
        return lambda contestants, pause: nullcontext()


class AlonePeer:
    """A contestant in a separate process."""

    version = ""            # unknown here, because nothing is imported; `PeerInfo` has it
    outputs = "returned by each call"

    def __init__(self, alone: Alone, name: str) -> None:
        self.alone, self.name = alone, name
        self.precision = PEER_LIBRARIES[name].precision if name in PEER_LIBRARIES else ""

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        """Prepare the case in a new process."""
        process, done = self.alone.prepared(self.name, case)
        prepared = PreparedPeer(lambda times: process.ask(("run", times), RUN_SECONDS),
                                lambda: done.outputs if case.alone else done.outputs[0], False, done.remark, done.identity, done.kernels,
                                done.prepare_seconds, done.search_seconds, contestant=RemoteContestant(process),
                                explain=lambda: process.ask(("explain",), RUN_SECONDS), precision=self.precision)
        return replace(prepared, again=lambda case, operands: prepared)     # one placement: the process has its own operands
