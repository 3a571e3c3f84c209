"""Chains for matrix products, batched and with an epilogue, in float32 and in narrow types."""
from __future__ import annotations

from amounts import Chain, Maker, stream, thread, tile

# isort: split
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target

PANEL_BYTES = 1 << 18       # of the right operand: up to here it is read where it lies, its rows stay in the second cache


def square(case: Case, target: Target) -> Chain:
    """Panels of the right operand are packed, once each, by the core that multiplies all rows by it. Two iterations of the sum in a row:
    the loop's own instructions would take the place of multiply-adds."""
    rows, columns = tile(case, target)
    packed = [["STAGE", "s1", "o1"]] if case.operands[1].nbytes > PANEL_BYTES else []
    return [["ORDER", "out", ["o1", "o0"]], ["UPCAST", "o0", rows], ["UPCAST", "o1", columns], ["UNROLL", "r0", 2], *packed,
            *stream(case, target), *thread("o1", target)]


def linear(case: Case, target: Target) -> Chain:
    """The weights, given transposed, are packed once at prepare; bias and activation are computed on the tile."""
    rows, columns = tile(case, target)
    return [["ORDER", "out", ["o1", "o0"]], ["UPCAST", "o0", rows], ["UPCAST", "o1", columns], ["LANES", "o1.in"], ["UNROLL", "r0", 2],
            ["STAGE", "s1", "root"], *stream(case, target), *thread("o1", target)]


def batched(case: Case, target: Target) -> Chain:
    """A batch per core; the short sum leaves the stores of the product as the larger part."""
    rows, columns = tile(case, target)
    return [["UPCAST", "o1", rows], ["UPCAST", "o2", columns], ["UNROLL", "r0", 2], ["ORDER", "out", ["o0", "o2", "o1"]],
            ["STAGE", "s1", "o2"], *stream(case, target), *thread("o0", target)]


def widened(case: Case, target: Target) -> Chain:
    """16-bit floats: both operands are made float32 once, the right one in panels."""
    rows, columns = tile(case, target)
    return [["ORDER", "out", ["o1", "o0"]], ["UPCAST", "o0", rows], ["UPCAST", "o1", columns], ["LANES", "o1.in"], ["UNROLL", "r0", 2],
            ["STAGE", "s0", "root"], ["STAGE", "s1", "root"], *thread("o1", target)]


def tiles(instruction: str, fallback: Maker) -> Maker:
    """A block of four tiles of results where the target has tiles, else `fallback`."""
    def make(case: Case, target: Target) -> Chain:
        if "amx" not in target.features:
            return fallback(case, target)
        return [["TC", "r0", [instruction, "o0", "o1"]], ["UPCAST", "o0", 2], ["UPCAST", "o1", 2], *thread("o0", target)]
    return make


def dots(instruction: str, feature: str, fallback: Maker) -> Maker:
    """Dot instructions of a vector where the target has them, on panels packed as they read them; else `fallback`."""
    def make(case: Case, target: Target) -> Chain:
        if feature not in target.features or target.vector_bytes < 64:
            return fallback(case, target)
        rows, columns = tile(case, target)
        return [["TC", "r0", instruction], ["ORDER", "out", ["o1", "o0"]], ["UPCAST", "o0", rows], ["UPCAST", "o1", columns],
                ["LANES", "o1.in"], ["STAGE", "s1", "o1"], ["UNROLL", "r0", 2], *stream(case, target), *thread("o1", target)]
    return make


CHAINS: dict[str, Maker] = {
    **{f"gemm_{n}": square for n in (256, 512, 1024, 2048)},
    "gemm_bias_gelu": linear,
    "bmm_12": batched,
    "gemm_1024_float16": widened,
    "gemm_1024_bfloat16": tiles("amxbf16", dots("bf16", "bf16", widened)),
    "gemm_1024_int8": tiles("amx8", dots("vnni8", "vnni", widened)),
}
