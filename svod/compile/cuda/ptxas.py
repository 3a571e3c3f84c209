"""The tools of NVIDIA's toolkit, where there are some: ptxas makes machine code (a cubin) of PTX, and says what it needs;
nvdisasm or cuobjdump prints it. Without ptxas the driver compiles the PTX when it is loaded."""
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
LIMIT = 300.0           # seconds
_ENTRY = re.compile(r"Function properties for (\w+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
                    r"ptxas info\s*: Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")
_VERSION = re.compile(r"V(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class KernelReport:
    """A kernel as ptxas describes it. `shared`, `stack`, `spill_stores` and `spill_loads` are bytes, those of shared memory without what a
    launch asks for."""

    symbol: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@lru_cache(maxsize=8)
def tool(name: str) -> str | None:
    """The path of a tool: on PATH, where the toolkit is usually installed, or of the packages nvidia-cuda-*. None where there is none."""
    found = shutil.which(name)
    places = [USUAL, *(Path(root, "cu13", "bin") for root in _package_roots())]
    return found or next((str(place / name) for place in places if (place / name).exists()), None)


def _package_roots() -> Sequence[str]:
    """The folders of NVIDIA's packages for Python."""
    spec = importlib.util.find_spec("nvidia")
    return [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)


@lru_cache(maxsize=1)
def ptxas_version() -> str | None:
    """The version of ptxas; None where there is none, or one that does not run."""
    path = tool("ptxas")
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=LIMIT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said)
    return found[1] if found else None


@lru_cache(maxsize=16)
def assembles(arch: str, version: int, target: str) -> bool:
    """Whether there is a ptxas that makes machine code for an architecture of PTX of a version, ten times, for a target. An older one than
    the GPU does not: the driver, which knows its GPU, compiles the PTX then."""
    if ptxas_version() is None:
        return False
    try:
        assemble(f".version {version // 10}.{version % 10}\n.target {target}\n.address_size 64\n", arch)
    except CompileError as e:
        log.warning("ptxas %s is not used for %s, whose driver compiles its code: %s", ptxas_version(), arch, e)
        return False
    return True


def assemble(ptx: str, arch: str) -> tuple[bytes, tuple[KernelReport, ...]]:
    """The cubin of PTX, and a report per kernel. Raises CompileError for PTX that ptxas refuses, UnsupportedError where there is none."""
    path = tool("ptxas")
    if path is None:
        raise UnsupportedError("there is no ptxas: install NVIDIA's CUDA toolkit, or put its bin folder on PATH")
    with temporary_folder("svod-ptxas-") as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        try:
            command = [path, "-v", f"-arch={arch}", str(source), "-o", str(cubin)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired as e:
            raise CompileError(f"ptxas took more than {LIMIT:.0f} seconds for {len(ptx.splitlines())} lines of PTX") from e
        except OSError as e:
            raise CompileError(f"ptxas could not be run: {e}") from e
        if ran.returncode or not cubin.exists():
            raise CompileError(f"ptxas refuses the PTX for {arch}: {(ran.stderr or ran.stdout).strip()[:2000]}")
        return cubin.read_bytes(), read_report(ran.stderr)


def read_report(said: str) -> tuple[KernelReport, ...]:
    """The kernels that `ptxas -v` describes."""
    reports = []
    for symbol, stack, stores, loads, registers, rest in _ENTRY.findall(said):
        shared = _SHARED.search(rest)
        reports.append(KernelReport(symbol, int(registers), int(shared[1]) if shared else 0, int(stack), int(stores), int(loads)))
    return tuple(sorted(reports, key=lambda r: r.symbol))


def disassemble(cubin: bytes) -> str:
    """The machine code (SASS) of a cubin, as text. Raises UnsupportedError where there is no tool for it, CompileError where it fails."""
    path = tool("nvdisasm") or tool("cuobjdump")
    if path is None:
        raise UnsupportedError("there is no nvdisasm and no cuobjdump: install NVIDIA's CUDA toolkit, or the package "
                               "nvidia-cuda-nvdisasm; asm() shows the PTX")
    with temporary_folder("svod-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [path, str(file)] if path.endswith("nvdisasm") else [path, "-sass", str(file)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise CompileError(f"{path} could not print the machine code: {e}") from e
    if ran.returncode:
        raise CompileError(f"{path} could not print the machine code: {ran.stderr.strip()[:2000]}")
    return ran.stdout
