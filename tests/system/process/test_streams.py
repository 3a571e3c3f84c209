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
    program = "from svod.system.process.streams import tell; tell('a line'); print('done')"
    done = subprocess.run(["sh", "-c", f'"$@" {stderr}', "sh", sys.executable, "-c", program], env=BUFFERED, stdout=subprocess.PIPE,
                          text=True, check=False, timeout=NEVER)
    assert (done.returncode, done.stdout) == (0, "done\n")
