"""A library in a process of its own that answers questions, a line of JSON each: what the scripts that compare libraries share."""
from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO


class Ended(SystemExit):
    """A process has ended, or was ended as it did not answer in time. Who does not catch it ends, and says so."""


class Peer:
    """A process that runs one library."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment)

    def send(self, question: Any) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self._ended()

    def receive(self, seconds: float | None = None) -> Any:
        """The answer to what was sent. Raises Ended where the process has ended, or does not answer within `seconds`."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:     # an answer is a line, so nothing is left from the one before
            self.end()
            raise Ended(f"no answer in {seconds:.0f} s")
        answer = self.process.stdout.readline()
        if not answer:
            self._ended()
        return json.loads(answer)

    def ask(self, question: Any, seconds: float | None = None) -> Any:
        """`send` and `receive`."""
        self.send(question)
        return self.receive(seconds)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _ended(self) -> NoReturn:
        raise Ended(f"{self.process.args} has ended; its error stands above")


@contextmanager
def peers(*commands: tuple[Sequence[str], dict[str, str]]) -> Iterator[list[Peer]]:
    """A process for each command and its environment, ended behind the block."""
    started: list[Peer] = []
    try:
        for command, environment in commands:
            started.append(Peer(command, environment))
        yield started
    finally:
        for p in started:
            p.end()


def serve(begin: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer the lines of standard input with the function that `begin` returns. What libraries print goes to standard error: it is no
    answer."""
    answers: TextIO = sys.stdout
    sys.stdout = sys.stderr
    answer = begin()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
