"""The standard streams: None without a console, closed by who started the process, without the methods of files in notebooks and
editors, or with a reader that has gone."""
from __future__ import annotations

import fcntl
import io
import os
import shutil
import sys
from typing import IO, Any, TextIO


def is_terminal(stream: Any) -> bool:
    """Whether people see the output of a stream as it comes."""
    try:
        return bool(stream.isatty())
    except (AttributeError, TypeError, ValueError, OSError):        # None, closed, or no file
        return False


def columns(stream: Any, otherwise: int) -> int:
    """The width in characters of the terminal behind a stream; `otherwise` where there is none."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else otherwise


def descriptor(stream: Any) -> int | None:
    """The open file descriptor of a stream; None where it has none."""
    try:
        number = stream.fileno()
        os.fstat(number)
    except (AttributeError, TypeError, ValueError, OSError):
        return None
    return int(number)


def errors() -> TextIO | _Nowhere:
    """Standard error, or a stream that leads nowhere: print(file=None) would write to standard output."""
    return sys.stderr if sys.stderr is not None else _Nowhere()


class _Nowhere(io.TextIOBase):
    """A stream without a reader."""

    def write(self, text: str) -> int:
        return len(text)


def tell(text: str) -> None:
    """Print a line on standard error; nothing happens where that has no reader any more."""
    try:
        print(text, file=errors(), flush=True)
    except (AttributeError, ValueError, OSError):       # closed, no file, or its reader has gone
        return


def above_standard(number: int) -> int:
    """A file descriptor above 2 in place of `number`, which is closed if it is another: where a process begins with closed streams, files
    that it opens get their numbers, and a child's streams take the place of what it is given under them."""
    if number > 2:
        return number
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


class _Closed(io.TextIOWrapper):
    """Stands for a standard stream that the caller has closed; it leads nowhere."""


def was_closed(stream: Any) -> bool:
    """Whether the caller has closed a standard stream, so that its output is lost. /dev/null is the caller's choice."""
    return stream is None or isinstance(stream, _Closed)


def prepare_streams() -> None:
    """Make the standard streams writable. Streams that the caller has closed (`svod-db list >&-`) lead nowhere, so that no file opened
    later gets their numbers. In the others, characters that the encoding lacks become question marks."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: IO[str] | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _Closed(os.fdopen(number, "wb", closefd=False), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
