"""The binary of a program for NVIDIA's GPUs: an image that the driver loads, its resources, and the LLVM IR that it was made from.

    "svodcuda" | the fields of `CudaCode` as MessagePack, compressed

The IR is kept for arguments that overlap or are not aligned for wide accesses: their code is compiled when it is first needed."""
from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from msgspec import MsgspecError
from msgspec.msgpack import decode, encode

from svod.compile.backend import CompilerPair
from svod.compile.cuda import ptx, ptxas
from svod.compile.cuda.ptxas import PtxasReport
from svod.compile.cuda.render import block_of, legal, render, without_assumptions
from svod.compile.cuda.targets import ARCHITECTURES, capability_of
from svod.compile.llvm.codegen import CODEGEN_REVISION, COMPILER
from svod.compile.lower.program import Program, ProgramSpec
from svod.compile.plan.plan_parts import LoadedCode
from svod.compile.resources import PhaseResources, resources_of
from svod.core.machine.target import Target
from svod.errors import CompileError

IMAGE_MAGIC = b"svodcuda"
CUDA_REVISION = 5       # increase it when the code of the same kernel and chain changes only for NVIDIA's GPUs
CUBIN, PTX = "cubin", "ptx"


@dataclass(frozen=True)
class CudaCode:
    """A program that a device can load. `kind`: CUBIN, or PTX, which the driver compiles."""

    arch: str
    kind: str
    image: bytes
    reports: tuple[PtxasReport, ...]
    source: str = field(repr=False)

    def pack(self) -> bytes:
        """Return the bytes that `unpack` reads."""
        return IMAGE_MAGIC + zlib.compress(encode(self))

    @staticmethod
    def unpack(code: bytes) -> CudaCode:
        """Read the code from a binary. Raises CompileError for invalid bytes."""
        try:
            if not code.startswith(IMAGE_MAGIC):
                raise ValueError("it does not begin as one")
            return decode(zlib.decompress(code[len(IMAGE_MAGIC):]), type=CudaCode)
        except (ValueError, zlib.error, MsgspecError) as e:
            raise CompileError(f"not the code of a program for NVIDIA's GPUs: {e}") from e

    def close(self) -> None:
        """Do nothing: a queue unloads the modules that it has loaded."""


def compile_image(ir: str, arch: str, assembled: bool = True) -> tuple[str, bytes, tuple[PtxasReport, ...]]:
    """Compile LLVM IR to (kind, image, reports): a cubin if `assembled` and there is a suitable ptxas, otherwise PTX. Raises
    CompileError."""
    text, known = ptx.emit_ptx(ir, arch), ARCHITECTURES[arch]
    if not assembled or not ptxas.assembles(arch, known.ptx, known.llvm_cpu):
        return PTX, text.encode() + b"\0", ()
    return CUBIN, *ptxas.assemble(text, arch)


class Nvptx(CompilerPair):
    """LINEAR → LLVM IR → PTX → a cubin, or PTX if there is no ptxas."""

    name = "nvptx"
    revision = CODEGEN_REVISION + CUDA_REVISION

    @property
    def key(self) -> str:       # type: ignore[override]
        version = ptxas.ptxas_version()
        return f"{COMPILER} nvptx, {'the driver' if version is None else f'ptxas {version}'}"

    def legal(self, program: Program, target: Target) -> Program:
        return legal(program, target)

    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        return render(program, target)

    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        kind, image, reports = self.image_of(source, target.cpu)
        return CudaCode(target.cpu, kind, image, reports, source).pack()

    def image_of(self, source: str, arch: str, assembled: bool = True) -> tuple[str, bytes, tuple[PtxasReport, ...]]:
        """Compile LLVM IR to (kind, image, reports)."""
        return compile_image(source, arch, assembled)

    def load(self, code: bytes, spec: ProgramSpec) -> CudaCode:
        return CudaCode.unpack(code)

    def image_for(self, code: CudaCode, plain: bool, major: int) -> bytes:
        """Return the image of a program for a device of this major compute capability; `plain`: without assumptions about its arguments. A
        cubin runs only on its own major capability; devices of a later one get PTX."""
        fits = code.kind != CUBIN or capability_of(code.arch)[0] == major
        if fits and not plain:
            return code.image
        return self.image_of(without_assumptions(code.source) if plain else code.source, code.arch, fits)[1]

    def optimize(self, source: str, target: Target) -> str:
        return ptx.after_passes(source, target.cpu)

    def assemble(self, source: str, target: Target) -> str:
        return ptx.emit_ptx(source, target.cpu)

    def disassemble(self, source: str, target: Target) -> str:
        found = CudaCode.unpack(self.compile(source, target))
        image = found.image if found.kind == CUBIN else ptxas.assemble(found.image.rstrip(b"\0").decode(), found.arch)[0]
        return ptxas.disassemble(image)

    def resources(self, code: bytes | LoadedCode, spec: ProgramSpec, target: Target) -> tuple[PhaseResources, ...]:
        found = CudaCode.unpack(code) if isinstance(code, bytes) else code
        assert isinstance(found, CudaCode)
        said = {r.symbol: r for r in found.reports}
        return tuple(resources_of(target, p, block_of(p), r.registers, r.stack, r.spill_stores, r.spill_loads)
                     if (r := said.get(p.symbol)) is not None else resources_of(target, p, block_of(p)) for p in spec.phases)
