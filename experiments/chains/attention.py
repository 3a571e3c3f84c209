"""The chain for attention: the scores of six queries at a time, from the product to the weighted sum, stay in the first cache."""
from __future__ import annotations

from amounts import Chain, Maker, lanes, thread, tile

# isort: split
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target


def attention(case: Case, target: Target) -> Chain:
    """s1: the keys, packed a head at a time; s2: scores; s3: their maximum; s4: exponentials; s5: their sum; s6: weights."""
    rows, columns = tile(case, target)
    n = 4 * lanes(case, target)
    return [["UPCAST", "o1", rows], ["UPCAST", "o2", columns], ["STAGE", "s1", "o0"],
            ["STAGE", "s2", "o1"], ["UPCAST", "s2.o1", rows], ["UPCAST", "s2.o2", columns], ["UNROLL", "s2.r0", 2],
            ["UPCAST", "s3.r0", n], ["STAGE", "s4", "o1"], ["UPCAST", "s5.r0", n], ["STAGE", "s6", "o1"], ["UNROLL", "r0", 2],
            *thread("o0", target)]


CHAINS: dict[str, Maker] = {"attention_12x512x64": attention}
