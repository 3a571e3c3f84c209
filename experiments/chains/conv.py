"""Chains for convolutions: one nest, with output channels or output columns as lanes."""
from __future__ import annotations

from amounts import Chain, Maker, lanes, stream, thread, tile

# isort: split
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target


def channels(positions: int, vectors: int, unroll: str) -> Maker:
    """Output channels are the vector, a tile of columns side by side: any stride reads single elements of the padded image, of which each
    core copies what its rows read. Weights are packed at prepare. The tile is turned in registers when it is stored."""
    def make(case: Case, target: Target) -> Chain:
        half = 1 if target.vector_registers >= 32 else 2
        tile_ = [["UPCAST", "o2", positions // half], ["UPCAST", "o0", vectors * lanes(case, target)], ["LANES", "o0.in"],
                 ["STAGE", "s0", "root"], ["UNROLL", unroll, 2]]
        if target.threads == 1:
            return [*tile_, ["STAGE", "s1", "root"]]
        share = -(-case.out_shape[-2] // target.threads)
        return [*tile_, ["TILE", "o1", share], ["ORDER", "out", ["o1", "o0", "o1.in", "o2"]], ["STAGE", "s1", "o1"], *thread("o1", target)]
    return make


def pointwise(case: Case, target: Target) -> Chain:
    """1×1 is a matrix product: columns of the image are the vector, a panel of it stays near for all output channels."""
    rows, columns = tile(case, target)
    return [["UPCAST", "o0", rows], ["UPCAST", "o1", columns], ["LANES", "o1.in"], ["ORDER", "out", ["o1", "o0"]], ["UNROLL", "r0", 2],
            *thread("o1", target)]


def depthwise(case: Case, target: Target) -> Chain:
    """Windows as straight-line code, those of four rows side by side: they share rows of the image, which is read in place, under masks."""
    return [["UPCAST", "o1", 4], ["UPCAST", "o2", lanes(case, target)], ["UNROLL", "r0", 0], ["UNROLL", "r1", 0], ["LANES", "o2.in"],
            *stream(case, target), *thread("o0", target)]


CHAINS: dict[str, Maker] = {
    "conv3x3_64_56": channels(14, 2, "r0"),
    "conv1x1_256_56": pointwise,
    "conv7x7_s2_224": channels(14, 2, "r2"),
    "conv_depthwise_112": depthwise,
}
