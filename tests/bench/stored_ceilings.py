"""Ceilings that a test stores for the processes that it starts."""
from __future__ import annotations

from pathlib import Path

import pytest

from svod.bench import roofline
from svod.bench.load import MachineLoad
from svod.compile.cpu.host import host_target
from tests.bench.example_run import CEILINGS


def store_ceilings(data: Path) -> None:
    """Store an example's ceilings as those of this machine under `data`, which commands get as XDG_DATA_HOME and then measure none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "measure_ceilings", lambda target, threads=None, *, quick=False: CEILINGS)
        roofline.cached_ceilings(data / "svod" / "ceilings.json", host_target(), watch=lambda: MachineLoad)
