"""The standard streams in all conditions: None without a console, closed by the parent process, objects in notebooks and editors that
lack the methods of files, or pipes whose reader has gone."""
from __future__ import annotations

import fcntl
import io
import os
import shutil
import sys
from typing import IO, Any, TextIO


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal, so that a person sees its output at once."""
    try:
        return bool(stream.isatty())
    except (AttributeError, TypeError, ValueError, OSError):        # None, closed, or not a file
        return False


def columns(stream: Any, otherwise: int) -> int:
    """The width in characters of the terminal behind a stream; `otherwise` if it is no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else otherwise


def descriptor(stream: Any) -> int | None:
    """The open file descriptor of a stream; None if it has none."""
    try:
        number = stream.fileno()
        os.fstat(number)
    except (AttributeError, TypeError, ValueError, OSError):
        return None
    return int(number)


def errors() -> TextIO | _Nowhere:
    """Standard error, or a stream that discards its output if there is none: print(file=None) would write to standard output."""
    return sys.stderr if sys.stderr is not None else _Nowhere()


class _Nowhere(io.TextIOBase):
    """A stream that discards its output."""

    def write(self, text: str) -> int:
        return len(text)


def tell(text: str) -> None:
    """Print a line on standard error, or do nothing if that is closed or has no reader any more."""
    try:
        print(text, file=errors(), flush=True)
    except (AttributeError, ValueError, OSError):       # closed, not a file, or its reader has gone
        drop(errors())


def drop(stream: Any) -> None:
    """Discard what a stream holds because it could not be written. Python would try again at its end, and exit with status 120."""
    number = descriptor(stream)
    if number is None:
        return
    try:
        with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(number), "wb") as before:
            os.dup2(nowhere.fileno(), number)
            try:
                stream.flush()
            finally:
                os.dup2(before.fileno(), number)
    except (ValueError, OSError):       # no descriptor is left, or the stream has been closed: it keeps what it holds
        return


def above_standard(number: int) -> int:
    """Duplicate a file descriptor below 3 to one above 2, and close the original; others are returned unchanged. A process started with
    closed standard streams gets their numbers for files that it opens, and a child process would use such a number for its own stream."""
    if number > 2:
        return number
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


class _Closed(io.TextIOWrapper):
    """Replaces a standard stream that the caller has closed, and discards its output."""


def was_closed(stream: Any) -> bool:
    """Whether the caller has closed a standard stream, so that its output is lost. False for /dev/null, which a caller chooses on
    purpose."""
    return stream is None or isinstance(stream, _Closed)


def prepare_streams() -> None:
    """Make the standard streams writable. Streams that the caller has closed (`svod-db list >&-`) discard their output and keep their
    numbers occupied, so that no file opened later gets these. In the others, characters that the encoding lacks become question marks."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: IO[str] | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _Closed(os.fdopen(number, "wb", closefd=False), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
