"""Chains for reductions over all elements, rows and columns, products of a matrix and a vector, and pooling."""
from __future__ import annotations

from amounts import Chain, Maker, lanes, thread

# isort: split
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target


def past_caches(case: Case, target: Target) -> bool:
    """Whether no cache holds what is read."""
    return case.bytes_read > max(target.l2, target.l3)


def halves(case: Case, target: Target) -> Chain:
    """Four halves of vectors in a row."""
    return [["UPCAST", "r0", max(1, lanes(case, target) // 2)], ["UNROLL", "r0", 4]]


def total(case: Case, target: Target) -> Chain:
    """A part per core, sixteen vectors of partial sums in each. Of what no cache holds four halves of vectors in a row: an AMD Zen 4
    fetches more of it at once."""
    if past_caches(case, target):
        return [*halves(case, target), *thread("r0", target)]
    return [["UPCAST", "r0", min(16, target.vector_registers // 2) * lanes(case, target)], *thread("r0", target)]


def rows(case: Case, target: Target) -> Chain:
    """Four rows at a time: as many streams, and what is done across lanes at the end is shared out."""
    return [["UPCAST", "o0", 4], ["UPCAST", "r0", (4 if target.vector_registers >= 32 else 2) * lanes(case, target)], ["LANES", "r0.in"],
            *thread("o0", target)]


def row_sums(case: Case, target: Target) -> Chain:
    """As a sum of all, row by row, where no cache holds them."""
    return [*halves(case, target), *thread("o0", target)] if past_caches(case, target) else rows(case, target)


def columns(case: Case, target: Target) -> Chain:
    """Rows stream past sums that lie in scratch, eight at a time; each core has a part of the rows."""
    return [["UPCAST", "o0", 4 * lanes(case, target)], ["UNROLL", "r0", 8], ["ORDER", "out", ["r0", "o0"]], *thread("r0", target)]


def pool(case: Case, target: Target) -> Chain:
    """Windows as straight-line code, those of four rows side by side. Where a few vectors hold a row it is computed whole: masks are known
    along it then. Else from padded rows of the image in scratch."""
    n = lanes(case, target)
    whole = case.out_shape[-1] <= 4 * n
    return [["UPCAST", "o1", 4], ["UPCAST", "o2", 0 if whole else n], ["UNROLL", "r0", 0], ["UNROLL", "r1", 0], ["LANES", "o2.in"],
            *([] if whole else [["STAGE", "s0", "o1"]]), *thread("o0", target)]


CHAINS: dict[str, Maker] = {
    "sum_16m": total,
    "row_sum_4096": row_sums,
    "gemv_4096": rows,
    "column_sum_4096": columns,
    "max_pool_64_112": pool,
}
