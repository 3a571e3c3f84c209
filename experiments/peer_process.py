"""A library in a process of its own that answers questions, a line of JSON each: what the scripts that compare libraries share."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO


class Peer:
    """A process that runs one library."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment)

    def ask(self, question: Any) -> Any:
        """The process's answer. Ends this process where that one has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args} has ended; its error stands above")
        return json.loads(answer)


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
            p.process.kill()
            p.process.wait()


def serve(begin: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer the lines of standard input with the function that `begin` returns. What libraries print goes to standard error: it is no
    answer."""
    answers: TextIO = sys.stdout
    sys.stdout = sys.stderr
    answer = begin()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
