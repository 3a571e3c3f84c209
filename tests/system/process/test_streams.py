"""Standard streams that cannot be written."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import NEVER

BUFFERED = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-", "2>/dev/null"])
def test_a_line_that_standard_error_does_not_take_leaves_the_exit_status_alone(stderr: str) -> None:
    done = run("tell('a line'); print('done')", stderr)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_program_without_free_descriptors_goes_on() -> None:
    done = run("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); tell('a line'); print('done')", "2>/dev/full")
    assert done.stdout == "done\n"


def run(lines: str, stderr: str) -> subprocess.CompletedProcess[str]:
    """Run lines of a program whose standard error is redirected."""
    program = f"from svod.system.process.streams import tell; {lines}"
    return subprocess.run(["sh", "-c", f'"$@" {stderr}', "sh", sys.executable, "-c", program], env=BUFFERED, stdout=subprocess.PIPE,
                          text=True, check=False, timeout=NEVER)
