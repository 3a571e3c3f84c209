"""The command lines. Each console script is a small `main` in a package here, which calls `run_command` with the module of its commands.

`run_command` runs a command so that it never shows a traceback. Bad input ends with one line and exit status 2, Ctrl-C at any moment
with one line and status 130, SIGTERM with status 143, a closed pipe silently. Characters that a stream's encoding lacks are replaced. The
handlers must be in place before Ctrl-C can come, so this module imports little, and `run_command` imports the rest.
"""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

from svod.system.process.program import arguments
from svod.system.process.signals import end_by, handle, learn_of_children
from svod.system.process.streams import prepare_streams, tell

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def one_line(error: BaseException) -> str:
    """An error's message on one line. For an OSError: the file's name, if it has one, and the operating system's message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def run_command(program: str, module: str, defaults: Mapping[str, str] | None = None) -> NoReturn:
    """Import `module`, call its click command `cli` and exit the process.

    `program` is the name in messages. `defaults` are environment variables for libraries that read them when imported; values set by the
    user take precedence."""
    status = 1
    handle(signal.SIGTERM, _terminate)
    learn_of_children()
    try:
        prepare_streams()
        status = _run(program, module, defaults or {})
        sys.stdout.flush()
    except KeyboardInterrupt:
        tell(f"{program}: interrupted")
        status = EXIT_INTERRUPTED
    except SystemExit as e:     # the command chose its exit status
        status = e.code if isinstance(e.code, int) else 1
    except BrokenPipeError:
        # the reader has gone (`svod-db list | head`); Python must not flush into the closed pipe at exit
        _write_no_more()
        status = 0
    except OSError as e:        # the disk is full: Python must not flush again at exit
        _write_no_more()
        tell(f"{program}: {one_line(e)}")
        status = EXIT_USAGE
    end_by(signal.SIGINT)       # from here on, while the interpreter exits, a Ctrl-C ends the process silently
    sys.exit(status)


def _write_no_more() -> None:
    """Discard further output on stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGTERM: exits by an exception, so that the command ends its processes, such as a script, first."""
    raise SystemExit(128 + number)


def completion_variable(program: str) -> str:
    """The environment variable through which a shell asks `program` for completions: `_SVOD_TUNE_COMPLETE=bash_source svod-tune` prints
    the code that the shell has to evaluate once."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"


def _run(program: str, module: str, defaults: Mapping[str, str]) -> int:
    """Run the command and report errors of its input. Returns the exit status."""
    import importlib

    from svod.config import child_environment, set_default_environment, unknown_variables_once
    from svod.errors import SvodError

    # Commands measure and ship the kernels' own code, so they use no first forms.
    set_default_environment(**defaults, SVOD_FIRST_FORMS="0")
    for message in unknown_variables_once():
        tell(f"{program}: warning: {message}")
    from click import ClickException
    from click.exceptions import Exit
    from click.shell_completion import shell_complete

    try:
        command = importlib.import_module(module).cli
        if (instruction := child_environment().get(variable := completion_variable(program))) is not None:
            return shell_complete(command, {}, program, variable, instruction)
        # not command.main(), which handles Ctrl-C and closed pipes in its own way
        with command.make_context(program, arguments()) as context:
            command.invoke(context)
    except Exit as e:       # --help, --version
        return e.exit_code
    except ClickException as e:     # unknown options, missing arguments
        e.show()
        return e.exit_code
    except BrokenPipeError:
        raise
    except (SvodError, OSError) as e:
        tell(f"{program}: {one_line(e)}")
        return EXIT_USAGE
    return 0
