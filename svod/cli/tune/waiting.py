"""Messages about what a command is doing while it prints nothing else.

On a terminal a line shows the current work and its duration, and disappears at the end. Without a terminal the line is printed once, if
the work takes longer than a second.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from svod.system.process.streams import is_terminal, tell

if TYPE_CHECKING:
    from rich.console import Console

QUIET_SECONDS = 1.0    # seconds of work before a message is printed without a terminal

_console: Console | None = None     # the console of the current line, above which other output is printed; None without a line


def say(text: str) -> None:
    """Print a line on stderr; stdout belongs to the script."""
    if _console is not None:
        _console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        tell(text)


@contextmanager
def waiting(what: str, program: str = "svod-tune") -> Iterator[None]:
    """Show `what` the program is doing while the body of the `with` runs."""
    global _console
    if not is_terminal(sys.stderr):
        timer = threading.Timer(QUIET_SECONDS, say, [f"{program}: {what} …"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    # the streams are not redirected, because the start of Ray replaces them meanwhile
    line = Progress(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console, transient=True,
                    redirect_stdout=False, redirect_stderr=False)
    line.add_task(what)
    with line:
        before, _console = _console, console
        try:
            yield
        finally:
            _console = before
