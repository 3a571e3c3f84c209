"""Each opt: a legal case with the resulting loops, and illegal cases with their reasons."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.chain_text import chain_text, chain_words, parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.opts import OPTS
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import AUTO, INLINE, ROOT, Opt, Scheduler
from svod.errors import KernelOptError
from tests.compile.native import AVX512
from tests.core.corpus import data, kernel_of
from tests.hand_kernels import HAND, gemm, softmax

TARGET = replace(AVX512, threads=4, features=(*AVX512.features, "vnni"))
BYTES = Kernel(kernel_of(data(24, 30, dtype="int8").cast("int32") @ data(30, 48, dtype="int8").cast("int32")))
GEMM = Kernel(gemm(24, 48, 30))
PRIME = Kernel(gemm(17, 19, 23))
SOFTMAX = Kernel(softmax(12, 40))
CONVOLUTION = Kernel(kernel_of(data(2, 3, 8, 8).conv2d(data(5, 3, 3, 3))))
GROUP_OPTS = ("LOCAL", "NOLOCALS", "GROUP", "GROUPTOP", "SPLITK", "PIPELINE")     # their legal cases: test_groups.py
OF_TILES = ("HOLD",)            # test_held.py
OF_FAST = ("ROUND",)            # test_round.py
Chain = list[list[Any]]


def apply(kernel: Kernel, chain: Chain) -> Scheduler:
    return apply_opts(Scheduler(kernel, TARGET), [Opt.from_json(o) for o in chain])


def loops(state: Scheduler, stage: str = "out") -> str:
    """Write the loops of a state, outermost first, as `o0:6 o1:48 r0:30`."""
    return " ".join(f"{state.rows[r].name}:{state.rows[r].extent}" for r in state.order[state.stage_id(stage)])


def table(state: Scheduler, axis: str) -> str:
    """Write the parts of an axis, outermost first, with extent×stride, as `loop 6×4, upcast 4×1`."""
    rows = state.axis_rows[state.kernel.axis_by_name[axis].index]
    return ", ".join(f"{state.rows[r].role} {state.rows[r].extent}×{state.rows[r].stride}" for r in rows)


# op, kernel, chain, loops afterwards, (axis, its rows afterwards)
LEGAL: list[tuple[str, Kernel, Chain, str, tuple[str, str]]] = [
    ("UPCAST", GEMM, [["UPCAST", "o0", 4]], "o0:6 o1:48 r0:30", ("o0", "loop 6×4, upcast 4×1")),
    ("UPCAST", GEMM, [["UPCAST", "o0", 0]], "o1:48 r0:30", ("o0", "loop 1×24, upcast 24×1")),
    ("UPCAST", PRIME, [["UPCAST", "o0", 4]], "o0:5 o1:19 r0:23", ("o0", "loop 5×4, upcast 4×1")),
    ("UPCAST", GEMM, [["UPCAST", "r0", 8]], "o0:24 o1:48 r0:4", ("r0", "loop 4×8, upcast 8×1")),
    ("UPCAST", GEMM, [["TILE", "o0", 8], ["UPCAST", "o0.in", 4]], "o0:3 o1:48 o0.in:2 r0:30", ("o0", "loop 3×8, loop 2×4, upcast 4×1")),
    ("UNROLL", GEMM, [["UNROLL", "r0", 5]], "o0:24 o1:48 r0:6", ("r0", "loop 6×5, unroll 5×1")),
    ("TILE", GEMM, [["TILE", "o0", 8]], "o0:3 o1:48 o0.in:8 r0:30", ("o0", "loop 3×8, loop 8×1")),
    ("TILE", GEMM, [["TILE", "r0", 10]], "o0:24 o1:48 r0:3 r0.in:10", ("r0", "loop 3×10, loop 10×1")),
    ("TILE", GEMM, [["TILE", "r0", 3], ["TILE", "r0", 2]], "o0:24 o1:48 r0:5 r0.in2:2 r0.in:3", ("r0", "loop 5×6, loop 2×3, loop 3×1")),
    ("TILE", GEMM, [["TILE", "o0", 4], ["TILE", "o0", 3]], "o0:2 o1:48 o0.in2:3 o0.in:4 r0:30", ("o0", "loop 2×12, loop 3×4, loop 4×1")),
    ("ORDER", GEMM, [["ORDER", "out", ["o1", "o0"]]], "o1:48 o0:24 r0:30", ("o0", "loop 24×1")),
    ("ORDER", GEMM, [["ORDER", "out", ["r0", "o1", "o0"]]], "r0:30 o1:48 o0:24", ("o0", "loop 24×1")),
    ("ORDER", GEMM, [["UPCAST", "o0", 0], ["ORDER", "out", ["o0", "r0", "o1"]]], "r0:30 o1:48", ("o1", "loop 48×1")),
    ("SWAP", GEMM, [["SWAP", "o0", "r0"]], "r0:30 o1:48 o0:24", ("o0", "loop 24×1")),
    ("PADTO", PRIME, [["PADTO", "o1", 8]], "o0:17 o1:24 r0:23", ("o1", "loop 24×1")),
    ("PADTO", PRIME, [["PADTO", "r0", 8], ["UNROLL", "r0", 8]], "o0:17 o1:19 r0:3", ("r0", "loop 3×8, unroll 8×1")),
    ("THREAD", GEMM, [["THREAD", "o1", 4]], "o1:48 o0:24 r0:30", ("o1", "loop 48×1")),
    ("THREAD", GEMM, [["THREAD", "r0", 4]], "o0:24 o1:48 r0:30", ("r0", "loop 30×1")),
    ("LANES", GEMM, [["UPCAST", "o0", 4], ["UPCAST", "o1", 16], ["LANES", "o0.in"]], "o0:6 o1:3 r0:30", ("o0", "loop 6×4, upcast 4×1")),
    ("TC", BYTES, [["TC", "r0", "vnni8"]], "o0:24 o1:48 r0:8", ("r0", "loop 8×4, dot 4×1")),
    ("TC", BYTES, [["STAGE", "s0", "root"], ["STAGE", "s1", "root"], ["TC", "r0", "vnni8"]], "o0:24 o1:48 r0:8",
     ("r0", "loop 8×4, dot 4×1")),
    ("STAGE", GEMM, [["STAGE", "s1", "o1"]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("STAGE", GEMM, [["STAGE", "s1", "root"]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("INLINE", GEMM, [["STAGE", "s1", "o1"], ["INLINE", "s1"]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("STREAM", GEMM, [["STREAM", "out"]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("PREFETCH", GEMM, [["PREFETCH", "p2", 4], ["PREFETCH", "p1", 8]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("PREFETCH", GEMM, [["STAGE", "s1", "o1"], ["PREFETCH", "p2", 4]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("PREFETCH", GEMM, [["STAGE", "s1", "root"], ["PREFETCH", "s1", 4]], "o0:24 o1:48 r0:30", ("o1", "loop 48×1")),
    ("ONLINE", SOFTMAX, [["ONLINE", "s1", 16]], "o0:12 o1:40", ("s3.r0", "loop 16×1")),
    ("FLATTEN", CONVOLUTION, [["FLATTEN", "out", None]], "o0:72 o1:5 r0:27", ("r0", "loop 27×1")),
    ("WINOGRAD", CONVOLUTION, [["WINOGRAD", "out", 2]], "o0:2 o1:5 o2:6 o3:6", ("s6.o4", "loop 3×1")),
]

# op, kernel, chain whose last opt is refused, words of the reason
ILLEGAL: list[tuple[str, Kernel, Chain, str]] = [
    ("UPCAST", GEMM, [["UPCAST", "o7", 4]], "no axis 'o7'"),
    ("UPCAST", GEMM, [["UPCAST", "o0", 1]], "changes nothing"),
    ("UPCAST", GEMM, [["UPCAST", "o0", -2]], "must be an int"),
    ("UPCAST", GEMM, [["UPCAST", "o0", 2.0]], "must be an int"),
    ("UPCAST", GEMM, [["UPCAST", "o0", True]], "must be an int"),
    ("UPCAST", GEMM, [["UPCAST", "o0", 25]], "has 24 positions"),
    ("UPCAST", GEMM, [["UPCAST", "o0", 4], ["UPCAST", "o0.in", 2]], "already upcast"),
    ("UPCAST", GEMM, [["UPCAST", "s0.o0", 4]], "computed in place"),
    ("UPCAST", GEMM, [["STAGE", "s0", "root"], ["UPCAST", "s0.o0", 4]], "copy loops"),
    ("UPCAST", GEMM, [["UPCAST", "o0", 24], ["UPCAST", "o1", 48]], "vector registers"),
    ("UPCAST", PRIME, [["TILE", "o0", 6], ["UPCAST", "o0.in", 4]], "remainder"),
    ("UPCAST", GEMM, [["STAGE", "s1", "o1"], ["UPCAST", "o1", 0]], "stage s1 lives there"),
    ("UPCAST", GEMM, [["THREAD", "o0", 4], ["UPCAST", "o0", 0]], "cores share"),
    ("UPCAST", GEMM, [["THREAD", "r0", 4], ["UPCAST", "r0", 0]], "cores share"),
    ("UNROLL", GEMM, [["UNROLL", "o0", 4]], "no accumulator"),
    ("UNROLL", Kernel(HAND["sums_int8"]()), [["UNROLL", "r0", 35]], "at most 32"),
    ("TILE", GEMM, [["TILE", "o0", 0]], "changes nothing"),
    ("TILE", GEMM, [["TILE", "o0", 24]], "changes nothing"),
    ("ORDER", GEMM, [["ORDER", "out", ["o0"]]], "two or more"),
    ("ORDER", GEMM, [["ORDER", "out", ["o0", "o0"]]], "two or more different"),
    ("ORDER", GEMM, [["ORDER", "out", ["o0", "o1"]]], "the order already"),
    ("ORDER", GEMM, [["ORDER", "s9", ["o0", "o1"]]], "no stage 's9'"),
    ("ORDER", SOFTMAX, [["ORDER", "out", ["o0", "s1.r0"]]], "not a loop of stage out"),
    ("ORDER", GEMM, [["TILE", "o0", 8], ["ORDER", "out", ["o0.in", "o0"]]], "keep their nesting"),
    ("ORDER", GEMM, [["THREAD", "o0", 2], ["ORDER", "out", ["o1", "o0"]]], "stays outermost"),
    ("SWAP", GEMM, [["SWAP", "o0", "o0"]], "two different loops"),
    ("SWAP", GEMM, [["SWAP", "o0", 3]], "name of another loop"),
    ("SWAP", GEMM, [["UPCAST", "o0", 0], ["SWAP", "o0", "o1"]], "no iterations left"),
    ("SWAP", SOFTMAX, [["SWAP", "o0", "s1.r0"]], "one stage"),
    ("PADTO", GEMM, [["PADTO", "o0", 8]], "a multiple of 8 already"),
    ("PADTO", PRIME, [["PADTO", "o0", 68]], "four times"),
    ("PADTO", PRIME, [["PADTO", "o0", 1]], "a multiple of 2 or more"),
    ("PADTO", PRIME, [["UPCAST", "o0", 4], ["PADTO", "o0", 4]], "before it is split"),
    ("PADTO", Kernel(gemm(1, 4, 4)), [["PADTO", "o0", 2]], "one position"),
    ("THREAD", GEMM, [["THREAD", "o0", 5]], "4 cores"),
    ("THREAD", GEMM, [["THREAD", "o0", 1]], "2 or more cores"),
    ("THREAD", GEMM, [["THREAD", "o0", 2], ["THREAD", "o1", 2]], "over cores already"),
    ("THREAD", SOFTMAX, [["THREAD", "s1.o0", 2]], "only the output stage"),
    ("THREAD", GEMM, [["TILE", "o0", 8], ["THREAD", "o0.in", 2]], "cannot become the outermost"),
    ("THREAD", GEMM, [["UPCAST", "o0", 0], ["THREAD", "o0", 2]], "no iterations left"),
    ("THREAD", Kernel(gemm(4, 4, 3)), [["THREAD", "r0", 4]], "at least 4 iterations"),
    ("THREAD", GEMM, [["STAGE", "s1", "o1"], ["THREAD", "r0", 2]], "cannot be cut"),
    ("LANES", GEMM, [["LANES", "o0"]], "only an upcast axis"),
    ("LANES", GEMM, [["UPCAST", "o0", 4], ["LANES", "o0.in"], ["LANES", "o0.in"]], "the vector already"),
    ("LANES", GEMM, [["UPCAST", "o0", 4], ["UPCAST", "o1", 4], ["LANES", "o0.in"], ["LANES", "o1.in"]], "chosen already"),
    ("STAGE", GEMM, [["STAGE", "out", "o0"]], "stored where it is computed"),
    ("STAGE", GEMM, [["STAGE", "s0", "o9"]], "no axis 'o9'"),
    ("STAGE", GEMM, [["STAGE", "s0", 3]], "name of a loop"),
    ("STAGE", GEMM, [["UPCAST", "o0", 4], ["STAGE", "s0", "o0.in"]], "lives inside a loop"),
    ("STAGE", GEMM, [["UPCAST", "o0", 0], ["STAGE", "s0", "o0"]], "no iterations left"),
    ("STAGE", GEMM, [["STAGE", "s0", "root"], ["STAGE", "s0", "root"]], "lives there already"),
    ("STAGE", SOFTMAX, [["STAGE", "s1", "s1.r0"]], "loop of the stage itself"),
    ("STAGE", SOFTMAX, [["STAGE", "s2", "o0"], ["STAGE", "s1", "s2.o0"]], "the copy loops of stage s2 are derived"),
    ("STAGE", SOFTMAX, [["STAGE", "s0", "s1.r0"]], "also read outside"),
    ("STAGE", GEMM, [["THREAD", "r0", 2], ["STAGE", "s0", "o0"]], "keeps its stages in place"),
    ("INLINE", GEMM, [["INLINE", "s0"]], "in place already"),
    ("TC", GEMM, [["TC", "r0", "vnni8"]], "made wide"),
    ("INLINE", GEMM, [["INLINE", "out"]], "an output is stored"),
    ("INLINE", SOFTMAX, [["INLINE", "s1"]], "in place already"),
    ("STREAM", GEMM, [["STREAM", "s0"]], "only an output"),
    ("STREAM", GEMM, [["STREAM", "out"], ["STREAM", "out"]], "streamed already"),
    ("STREAM", GEMM, [["STREAM", "out", 5]], "takes no argument"),
    ("LANES", GEMM, [["UPCAST", "o0", 4], ["LANES", "o0.in", 4]], "takes no argument"),
    ("INLINE", GEMM, [["STAGE", "s0", "root"], ["INLINE", "s0", "root"]], "takes no argument"),
    *((op, GEMM, [[op, "r0", 4]], f"{op}.* the target x86_64 has no") for op in GROUP_OPTS),
    ("HOLD", GEMM, [["HOLD", "out", ["mma_bf16", "o0", "o1"]]], "no threads of the target hold tiles of mma_bf16"),
    ("PREFETCH", GEMM, [["PREFETCH", "p3", 4]], "no such argument or stage at the root; the kernel has p0, p1, p2"),
    ("PREFETCH", GEMM, [["PREFETCH", "s1", 4]], "no such argument or stage at the root"),
    ("PREFETCH", GEMM, [["STAGE", "s1", "o1"], ["PREFETCH", "s1", 4]], "no such argument or stage at the root"),
    ("PREFETCH", GEMM, [["STAGE", "s1", "root"], ["PREFETCH", "s1", 4], ["PREFETCH", "s1", 5]], "prefetched already"),
    ("PREFETCH", Kernel(gemm(1, 4, 3)), [["STAGE", "s1", "root"], ["UNROLL", "r0", 0], ["UPCAST", "o1", 0], ["PREFETCH", "s1", 4]],
     "no loop is left"),
    ("PREFETCH", GEMM, [["PREFETCH", "p1", 0]], "an int of 1 to 64"),
    ("PREFETCH", GEMM, [["PREFETCH", "p1", 65]], "an int of 1 to 64"),
    ("PREFETCH", GEMM, [["PREFETCH", "p1", True]], "an int of 1 to 64"),
    ("PREFETCH", GEMM, [["PREFETCH", "p0", 4]], "does not read p0"),
    ("PREFETCH", GEMM, [["PREFETCH", "p1", 4], ["PREFETCH", "p1", 8]], "prefetched already"),
    ("PREFETCH", Kernel(gemm(1, 4, 3)), [["UNROLL", "r0", 0], ["PREFETCH", "p1", 4]], "no loop is left"),
    ("PREFETCH", Kernel(kernel_of(data(1).expand(5) + data(5))), [["PREFETCH", "p1", 4]], "at one place"),
    ("ONLINE", SOFTMAX, [["ONLINE", "s1", 0]], "a block is 2 to 39"),
    ("FLATTEN", GEMM, [["FLATTEN", "out", None]], "two matrices already"),
    ("FLATTEN", CONVOLUTION, [["FLATTEN", "out", 2]], "takes a stage alone"),
    ("FLATTEN", CONVOLUTION, [["UPCAST", "o0", 2], ["FLATTEN", "out", None]], "comes before all other opts"),
    ("FLATTEN", CONVOLUTION, [["FLATTEN", "s9", None]], "no stage 's9'"),
    ("WINOGRAD", GEMM, [["WINOGRAD", "out", 2]], "reads no windows"),
    ("WINOGRAD", CONVOLUTION, [["WINOGRAD", "out", None]], "needs the outputs of a tile"),
    ("WINOGRAD", CONVOLUTION, [["WINOGRAD", "out", 1]], "a tile is 2 to"),
    ("WINOGRAD", CONVOLUTION, [["UPCAST", "o0", 2], ["WINOGRAD", "out", 2]], "comes before all other opts"),
    ("WINOGRAD", CONVOLUTION, [["WINOGRAD", "s0", 2]], "no output"),
    ("ROUND", GEMM, [["ROUND", "out", "bfloat16"]], "keeps products of float32 as exact as they are"),
    ("ROUND", GEMM, [["ROUND", "out", "float16"]], "needs the type to round to"),
]


@pytest.mark.parametrize(("op", "kernel", "chain", "after", "rows"), LEGAL, ids=[f"{c[0]}-{c[2]}" for c in LEGAL])
def test_legal(op: str, kernel: Kernel, chain: Chain, after: str, rows: tuple[str, str]) -> None:
    assert chain[-1][0] == op or chain[0][0] == op
    state = apply(kernel, chain)
    assert loops(state) == after
    assert table(state, rows[0]) == rows[1]
    assert [o.to_json()[:2] for o in state.applied_opts] == [o[:2] for o in chain]


@pytest.mark.parametrize(("kernel", "chain"), [c[1:3] for c in LEGAL], ids=[f"{c[0]}-{c[2]}" for c in LEGAL])
def test_a_step_keeps_no_plan_that_it_changes(kernel: Kernel, chain: Chain) -> None:
    state = Scheduler(kernel, TARGET)
    for opt in chain:
        place_stages(state)
        state = apply_opt(state, Opt.from_json(opt))
        assert place_stages(state) == place_stages(state.copy())


@pytest.mark.parametrize(("op", "kernel", "chain", "why"), ILLEGAL, ids=[f"{c[0]}-{c[3]}" for c in ILLEGAL])
def test_illegal(op: str, kernel: Kernel, chain: Chain, why: str) -> None:
    assert chain[-1][0] == op
    before = apply(kernel, chain[:-1])
    digest = before.digest
    with pytest.raises(KernelOptError, match=why):
        apply_opt(before, Opt.from_json(chain[-1]))
    assert before.digest == digest and len(before.applied_opts) == len(chain) - 1


@pytest.mark.parametrize("op", OPTS)
def test_what_is_written_of_an_opt_is_read_back(op: str) -> None:
    """The text of an opt is read back: in chains and alone, from an Opt and from a record, without operands, with an amount, with names."""
    chains = [c[2] for c in LEGAL if c[0] == op]
    chains += [[[op, "out", None]], [[op, "o0.in", 16]], [[op, "s1", ["mma_bf16", "o1", "o0"]]]]
    for chain in chains:
        opts = tuple(map(Opt.from_json, chain))
        assert chain_text(chain) == chain_words(chain) == chain_text(opts) == " ".join(map(str, opts))
        assert parse_chain(chain_text(chain)) == opts


def test_chains_of_records_that_are_not_read_back() -> None:
    """A chain without opts is written as special words, and opts that this version does not know are written in the form of known ones."""
    assert chain_words([]) == "as it is" and parse_chain(" as it is\n") == () and chain_text([]) == ""
    foreign = [["NEW"], ["NEW", None, None], ["SWAP", "o0", "o1"], ["NEW", "o0", 2, "x"]]
    assert chain_text(foreign) == "NEW() NEW() SWAP(o0, o1) NEW(o0, 2,x)"


def test_every_opt_has_a_case() -> None:
    legal, illegal = {c[0] for c in LEGAL}, {c[0] for c in ILLEGAL}
    assert illegal == set(OPTS)
    assert legal | {*GROUP_OPTS, *OF_TILES, *OF_FAST} == set(OPTS)


def test_unknown_opts_are_named() -> None:
    with pytest.raises(KernelOptError, match="FUSE is not an opt"):
        apply(GEMM, [["FUSE", "o0", 2]])


# -- hints and placements -------------------------------------------------------------------------------
def test_placements() -> None:
    state = Scheduler(SOFTMAX, TARGET)
    assert state.place == (INLINE, AUTO, INLINE, AUTO, ROOT)
    staged = apply(SOFTMAX, [["STAGE", "s2", "o0"], ["STAGE", "s0", "root"]])
    out = SOFTMAX.output
    assert place_stages(staged).paths[2] == ((out, 1),) and place_stages(staged).paths[0] == ()
    # maxima and sums are placed in the loop over rows, where they are computed once per row
    assert place_stages(staged).paths[1] == ((out, 1),) and place_stages(staged).paths[3] == ((out, 1),)
    assert place_stages(staged).children[out, 1] == (1, 2, 3)


def test_inlining_a_reduction_takes_it_back_to_its_place() -> None:
    assert apply(SOFTMAX, [["STAGE", "s1", "root"], ["INLINE", "s1"]]).place[1] == AUTO


def test_what_nothing_repeats_is_a_phase_of_its_own() -> None:
    """With the columns outermost, the maximum of a row would be computed for every column."""
    swapped = apply(SOFTMAX, [["SWAP", "o0", "o1"]])
    assert place_stages(swapped).paths[1] == ((SOFTMAX.output, 2),)
    columns = apply(SOFTMAX, [["UPCAST", "o0", 0], ["STAGE", "s2", "root"]])
    assert place_stages(columns).paths[1] == () and place_stages(columns).paths[3] == ()


def test_thread_and_stream_are_hints_of_the_state() -> None:
    state = apply(GEMM, [["THREAD", "o0", 3], ["STREAM", "out"]])
    assert state.thread == (state.row_id("o0"), 3) and state.stream and state.split_reduce is None
    assert apply(GEMM, [["THREAD", "r0", 3]]).split_reduce == (GEMM.axis_by_name["r0"].index, 3)
