"""Chains for fused rows: one kernel, memory read and written once."""
from __future__ import annotations

from amounts import Chain, Maker, lanes, stream, thread

# isort: split
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target


def softmax(case: Case, target: Target) -> Chain:
    """The exponentials of a row are kept for the division. Eight vectors of partial maxima and sums."""
    n = 8 * lanes(case, target)
    return [["UPCAST", "s1.r0", n], ["UPCAST", "s3.r0", n], ["UPCAST", "o1", n], ["STAGE", "s2", "o0"], *stream(case, target),
            *thread("o0", target)]


def layer_norm(case: Case, target: Target) -> Chain:
    """Mean, variance and result read the row three times, from memory once."""
    n = 4 * lanes(case, target)
    return [["UPCAST", "s1.r0", n], ["UPCAST", "s3.r0", n], ["UPCAST", "o1", n], *stream(case, target), *thread("o0", target)]


CHAINS: dict[str, Maker] = {"softmax_4096x1024": softmax, "layer_norm_4096x768": layer_norm}
