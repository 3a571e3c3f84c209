"""The tools of NVIDIA's toolkit, if they are installed: ptxas compiles PTX to machine code (a cubin) and reports its resources; nvdisasm or
cuobjdump prints it. Without ptxas, the driver compiles the PTX when it is loaded."""
from __future__ import annotations

import importlib.util
import logging
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from svod.errors import CompileError, UnsupportedError
from svod.system.process.directories import temporary_folder

log = logging.getLogger("svod.cuda")

USUAL = Path("/usr/local/cuda/bin")
PTXAS_SECONDS = 300.0    # seconds after which a run of ptxas is ended
_ENTRY = re.compile(r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
                    r"ptxas info\s*: Used (\d+) registers(.*)")
_SHARED_BYTES = re.compile(r"(\d+) bytes smem")
_VERSION = re.compile(r"V(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class PtxasReport:
    """A kernel as ptxas describes it. `shared`, `stack`, `spill_stores` and `spill_loads` are bytes; `shared` does not include the bytes
    that a launch requests."""

    symbol: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@lru_cache(maxsize=8)
def tool(name: str) -> str | None:
    """Find the path of a tool: on PATH, in the usual places of the toolkit, or in the packages nvidia-cuda-*. None if it is not there."""
    found = shutil.which(name)
    places = [USUAL, *(Path(root, "cu13", "bin") for root in _package_roots())]
    return found or next((str(place / name) for place in places if (place / name).exists()), None)


def _package_roots() -> Sequence[str]:
    """Find the folders of NVIDIA's Python packages."""
    spec = importlib.util.find_spec("nvidia")
    return [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)


@lru_cache(maxsize=1)
def ptxas_version() -> str | None:
    """Return the version of ptxas; None if it is missing or does not run."""
    path = tool("ptxas")
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PTXAS_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said)
    return found[1] if found else None


@lru_cache(maxsize=16)
def assembles(arch: str, version: int, target: str) -> bool:
    """Whether a ptxas is installed that compiles PTX to machine code of an architecture. `version`: 10 × the version of the PTX;
    `target`: the PTX's target. A ptxas older than the GPU cannot do it; then the GPU's driver compiles the PTX."""
    if ptxas_version() is None:
        return False
    try:
        assemble(f".version {version // 10}.{version % 10}\n.target {target}\n.address_size 64\n", arch)
    except CompileError as e:
        log.warning("ptxas %s is not used for %s, whose driver compiles its code: %s", ptxas_version(), arch, e)
        return False
    return True


def assemble(ptx: str, arch: str) -> tuple[bytes, tuple[PtxasReport, ...]]:
    """Compile PTX to a cubin, and return it with a report per kernel. Raises CompileError for PTX that ptxas rejects, and UnsupportedError
    if there is no ptxas."""
    path = tool("ptxas")
    if path is None:
        raise UnsupportedError("there is no ptxas: install NVIDIA's CUDA toolkit, or put its bin folder on PATH")
    with temporary_folder("svod-ptxas-") as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        try:
            command = [path, "-v", f"-arch={arch}", str(source), "-o", str(cubin)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=PTXAS_SECONDS, check=False)
        except subprocess.TimeoutExpired as e:
            raise CompileError(f"ptxas took more than {PTXAS_SECONDS:.0f} seconds for {len(ptx.splitlines())} lines of PTX") from e
        except OSError as e:
            raise CompileError(f"ptxas could not be run: {e}") from e
        if ran.returncode or not cubin.exists():
            raise CompileError(f"ptxas refuses the PTX for {arch}: {(ran.stderr or ran.stdout).strip()[:2000]}")
        return cubin.read_bytes(), read_report(ran.stderr)


def read_report(said: str) -> tuple[PtxasReport, ...]:
    """Parse the output of `ptxas -v` to a report per kernel."""
    reports = []
    for symbol, stack, stores, loads, registers, rest in _ENTRY.findall(said):
        shared = _SHARED_BYTES.search(rest)
        reports.append(PtxasReport(symbol, int(registers), int(shared[1]) if shared else 0, int(stack), int(stores), int(loads)))
    return tuple(sorted(reports, key=lambda r: r.symbol))


def disassemble(cubin: bytes) -> str:
    """Return the machine code (SASS) of a cubin, as text. Raises UnsupportedError if there is no tool for it, and CompileError if the tool
    fails."""
    path = tool("nvdisasm") or tool("cuobjdump")
    if path is None:
        raise UnsupportedError("there is no nvdisasm and no cuobjdump: install NVIDIA's CUDA toolkit, or the package "
                               "nvidia-cuda-nvdisasm; asm() shows the PTX")
    with temporary_folder("svod-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [path, str(file)] if path.endswith("nvdisasm") else [path, "-sass", str(file)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=PTXAS_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise CompileError(f"{path} could not print the machine code: {e}") from e
    if ran.returncode:
        raise CompileError(f"{path} could not print the machine code: {ran.stderr.strip()[:2000]}")
    return ran.stdout
