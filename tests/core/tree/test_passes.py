"""Loop trees of small kernels after each pass, compared as text; and a pass that a user adds."""
from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from textwrap import dedent

import numpy as np
import pytest

from svod import Variable
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Loop, Phase, Reduction, with_bodies, with_loops
from svod.core.tree.passes import PASSES, TreePass, loop_tree
from svod.core.tree.show import print_nest
from svod.core.tree.text import format_tree
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.chains import group_state, pipelined_state
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import CORPUS, conv, data, kernel_of
from tests.toy_backend.target import TOY

Chain = tuple[str, str, int | str | None]


def state_of(tensor: Tensor, *chain: Chain, target: Target = AVX2) -> Scheduler:
    return apply_opts(Scheduler(Kernel(kernel_of(tensor)), target), [Opt(*o) for o in chain])


def tree(last: str | None, tensor: Tensor, *chain: Chain, target: Target = AVX2) -> str:
    state = state_of(tensor, *chain, target=target)
    return format_tree(state.kernel, loop_tree(state, last))


def test_launch() -> None:
    """The launch runs over the outer loops, up to one with enough iterations or one that contains a stage."""
    assert tree("", data(5, 6, 7) + 1, ("UPCAST", "o0", 8)) == dedent("""\
        phase out, output
          launch once
            loop o0 by 8 (27), the last tile moved back
              store o0 8""")
    assert tree("launch", data(5, 6, 7) + 1, ("UPCAST", "o0", 8)) == dedent("""\
        phase out, output
          launch o0 by 8 (27)
            store o0 8""")


def test_tails_of_a_sum() -> None:
    """A sum of 70 by 4 has 17 iterations and a tail of 2; the stage inside is smaller in the tail."""
    chain = (("UPCAST", "o1", 8), ("TILE", "r0", 4), ("STAGE", "s1", "r0"))
    assert tree("launch", data(4, 70) @ data(70, 8), *chain) == dedent("""\
        phase out, output
          launch o0 (4)
            reduction
              loop r0 by 4 (17)
                copy s1[8, 4], scratch
                  loop s1.o1 by 4 (1)
                    loop s1.o0 by 8 (1)
                      store s1.o0 8 × s1.o1 4
                loop r0 (4)
                  accumulate o1 8""")
    assert tree("tails", data(4, 70) @ data(70, 8), *chain) == dedent("""\
        phase out, output
          launch o0 (4)
            reduction
              loop r0 by 4 (17)
                copy s1[8, 4], scratch
                  loop s1.o1 by 4 (1), once
                    loop s1.o0 by 8 (1), once
                      store s1.o0 8 × s1.o1 4
                loop r0 (4)
                  accumulate o1 8
              tail of 2
                copy s1[8, 2], scratch
                  loop s1.o1 by 2 (1), once
                    loop s1.o0 by 8 (1), once
                      store s1.o0 8 × s1.o1 2
                loop r0 (2)
                  accumulate o1 8""")


def test_tails_of_an_extent_that_a_variable_ends() -> None:
    """The loop runs over complete tiles, then over vectors, the last of which is masked; the last few rows of accumulators run one by
    one."""
    n = Variable("n", 1, 100).bind(50)
    assert tree("tails", data(100)[:n] * 2, ("UPCAST", "o0", 32)) == dedent("""\
        phase out, output
          launch o0 by 32 (4)
            all positions inside
              store o0 32
            some positions inside
              the rest of o0 by 8
                store o0 8""")
    assert tree("tails", data(100, 6)[:n] @ data(6, 8), ("UPCAST", "o0", 6), ("UPCAST", "o1", 8)) == dedent("""\
        phase out, output
          launch o0 by 6 (17)
            all positions inside
              reduction
                loop r0 (6)
                  accumulate o0 6 × o1 8
            some positions inside
              the rest of o0, where few are left
                reduction
                  loop r0 (6)
                    accumulate o1 8
              the rest of o0 by 3, where many are left
                reduction
                  loop r0 (6)
                    accumulate o0 3 × o1 8""")


def test_blocks_of_a_long_sum() -> None:
    text = tree("blocks", data(3, 4096).sum(1))
    assert "loop r0 (4096), in blocks of" in text
    assert "in blocks" not in tree("tails", data(3, 4096).sum(1))
    assert "in blocks" not in tree("blocks", data(3, 40).sum(1))


def test_skips_of_wide_padding() -> None:
    """Most taps of the first rows are in the padding, and the loop over taps skips them."""
    image = conv(4, 4, 6, 5, padding=4)
    assert "skipping" not in tree("blocks", image)
    assert "skipping what adds nothing" in tree("skips", image)
    assert "skipping" not in tree("skips", conv(4, 4, 6, 3))


def test_copies_ahead() -> None:
    """The copy of one operand transposes it, which an asynchronous copy cannot do, so it passes through registers."""
    chain = (("LOCAL", "o0", 4), ("LOCAL", "o1", 8), ("TILE", "r0", 4), ("STAGE", "s0", "r0"), ("STAGE", "s1", "r0"), ("PIPELINE", "r0", 2))
    before, after = (tree(name, data(8, 16) @ data(16, 16), *chain, target=TOY) for name in ("skips", "ahead"))
    assert "copy s0[4, 4], shared, 4 parts by 32 threads in 1 turn\n" in before and "ahead" not in before
    assert after == dedent("""\
        phase out, output
          launch o0 by 4 (2), o1 by 8 (2)
            reduction
              loop r0 by 4 (4)
                copy s0[4, 4], shared, 4 parts by 32 threads in 1 turn, ahead by way of registers
                copy s1[8, 4], shared, 8 parts by 32 threads in 1 turn, ahead
                prologue, i = 0: copy for i
                each iteration i: wait for all commits but 0, barrier, copy for i + 1
                epilogue: wait for all commits but 0
                loop r0 (4)
                  accumulate""")


def product_of_tiles(*chain: Opt) -> Scheduler:
    """Make a product with sixteen matrix instructions per iteration, four for each accumulator of a subgroup."""
    opts = [Opt("TC", "r0", ("mma_bf16", "o0", "o1")), *[Opt(name, axis, 2) for name in ("UPCAST", "LOCAL") for axis in ("o0", "o1")],
            Opt("TILE", "r0", 4), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), *chain, Opt("PIPELINE", "r0", 2)]
    return apply_opts(Scheduler(gemm(64, 32, 256, dtypes.bfloat16, dtypes.bfloat16), card_target("sm_80", group_threads=128)), opts)


def test_copies_begin_between_products_and_operands_are_loaded_early() -> None:
    """Copies begin after the fifth and the eighth product; the operands of the next iteration are loaded before the last four."""
    state = product_of_tiles(Opt("UNROLL", "r0.in2", 0))
    before, between, early = (format_tree(state.kernel, loop_tree(state, name)) for name in ("ahead", "between", "early"))
    begins = """
        after 5 products: begin copies, part 1 of 2
        after 8 products: begin copies, part 2 of 2
"""
    assert "each iteration i: wait for all commits but 0, barrier, prepare copies for i + 1, begin copies\n" in before
    assert f"each iteration i: wait for all commits but 0, barrier, prepare copies for i + 1{begins}" in between
    assert "prologue, i = 0: copy for i, wait for all commits but 0, barrier, load operands of 4 products of i\n" in early
    assert f"each iteration i: prepare copies for i + 1{begins}" + """\
        after 12 products: load operands of 4 products of i, wait for all commits but 0, barrier, load operands of 4 products of i + 1
""" in early


def test_products_in_a_loop_leave_copies_and_operands_where_they_are() -> None:
    state = product_of_tiles()
    assert loop_tree(state, "early") == loop_tree(state, "ahead")


def test_steps_stand_in_linear_where_the_tree_has_them() -> None:
    code = lower(product_of_tiles(Opt("UNROLL", "r0.in2", 0))).code[0]
    told = [i.op for i in code if i.op in ("LOOP", "WAIT", "BARRIER", "MMA", "COMMIT", "ENDLOOP")]
    assert told == ["LOOP", "COMMIT", "WAIT", "BARRIER", "LOOP", *["MMA"] * 8, "COMMIT", *["MMA"] * 4, "WAIT", "BARRIER", *["MMA"] * 4,
                    "ENDLOOP", "WAIT", "ENDLOOP"]


def test_barriers() -> None:
    """Threads wait before they fill shared memory that others may still read, and before they read it."""
    chain = (("LOCAL", "o0", 4), ("LOCAL", "o1", 8), ("TILE", "r0", 4), ("STAGE", "s0", "r0"), ("STAGE", "s1", "r0"))
    before, after = (tree(name, data(8, 16) @ data(16, 16), *chain, target=TOY) for name in ("early", "barriers"))
    assert "barrier" not in before
    assert after == dedent("""\
        phase out, output
          launch o0 by 4 (2), o1 by 8 (2)
            reduction
              loop r0 by 4 (4)
                copy s0[4, 4], shared, 4 parts by 32 threads in 1 turn
                  barrier
                copy s1[8, 4], shared, 8 parts by 32 threads in 1 turn
                barrier
                loop r0 (4)
                  accumulate""")


def test_barriers_of_parts_of_a_sum() -> None:
    """Five threads do not exchange values by shuffles, so their parts go through shared memory."""
    assert tree("barriers", data(4, 20).sum(1), ("LOCAL", "o0", 2), ("GROUP", "r0", 5), target=TOY) == dedent("""\
        phase out, output
          launch o0 by 2 (2)
            reduction
              loop r0 by 5 (4)
                accumulate
              partial results of threads to shared memory
              barrier""")


def depths(nest: str) -> list[list[int]]:
    """Per phase of a printed nest: the number of loops around each barrier, except loops over the grid."""
    found, around = list[list[int]](), list[tuple[int, bool]]()     # around: (indentation, whether the line is a loop)
    for line in nest.splitlines():
        indent, word = len(line) - len(line.lstrip()), line.split()[0]
        around = [] if word == "phase" else [one for one in around if one[0] < indent]
        if word == "phase":
            found.append([])
        elif word == "barrier":
            found[-1].append(sum(is_loop for _, is_loop in around))
        around.append((indent, word in ("for", "reduce")))
    return found


def depths_in_linear(program: Program) -> list[list[int]]:
    """Per phase: the number of loops around each BARRIER, except the loop over the launch."""
    found = []
    for code in program.code:
        opened, own = -1, list[int]()
        for i in code:
            opened += (i.op == "LOOP") - (i.op == "ENDLOOP")
            own += [opened] * (i.op == "BARRIER")
        found.append(own)
    return found


@pytest.mark.parametrize(("target", "how"), [(TOY, "ahead\n"), (replace(TOY, bulk_row=16), "ahead in bulk\n"),
                                             (replace(TOY, subgroup=0, has_async_copies=False), "ahead by way of registers\n")])
def test_linear_has_the_barriers_that_the_tree_and_the_nest_tell(target: Target, how: str) -> None:
    """The tree has as many barriers as LINEAR. The printed nest has each in the same loops, where it has all loops that are emitted: it
    shows no tails and no blocks, and no loops over accumulators in memory. `how`: the way of some copies that run ahead."""
    told, shown = list[int](), list[str]()
    for name in dict.fromkeys([*list(CORPUS)[::3], *[name for name in CORPUS if name.startswith("gemm")]]):
        base, rng = Scheduler(Kernel(CORPUS[name]()), target), random.Random(name)
        for state in (group_state(rng, base, 8), *[pipelined_state(rng, base) for _ in range(2)]):
            try:
                program = lower(state)
            except KernelOptError:      # too much shared memory
                continue
            text = format_tree(state.kernel, loop_tree(state))
            told.append(text.count("barrier"))
            assert sum(i.op == "BARRIER" for code in program.code for i in code) == told[-1], (name, text)
            if not any(part in text for part in ("tail of", "in blocks", "in memory")):
                assert depths(print_nest(state)) == depths_in_linear(program), (name, text)
                shown += [text] * (told[-1] > 0)
    assert sum(n > 0 for n in told) > len(told) // 8 and len(shown) > len(told) // 16 and any(how in text for text in shown)


def test_prefetches() -> None:
    """Each body says which loads of its statement prefetch, and by how much: those of the first operand move by two elements an iteration,
    those of the second by two rows. Groups of threads prefetch nothing."""
    chain = (("UPCAST", "o1", 16), ("UNROLL", "r0", 2), ("PREFETCH", "p1", 5), ("PREFETCH", "p2", 1))
    state = state_of(data(24, 30) @ data(30, 48), *chain, target=AVX512)
    assert format_tree(state.kernel, loop_tree(state, "prefetches")) == dedent("""\
        phase out, output
          launch o0 (24), o1 by 16 (3)
            reduction
              loop r0 by 2 (15)
                prefetch p1, 5 iterations ahead
                prefetch p2, 1 iteration ahead
                accumulate o1 16 × r0 2""")
    reduction = loop_tree(state)[0].launch.body.inner
    assert isinstance(reduction, Reduction) and isinstance(reduction.inner, Loop)
    assert [(p.source, p.ahead, p.step) for p in reduction.inner.body.prefetches] == [("p1", 5, 2), ("p2", 1, 2 * 48)]
    on_groups = state_of(data(24, 30) @ data(30, 48), *chain, target=TOY)
    assert loop_tree(on_groups, "prefetches") == loop_tree(on_groups, "early")


def test_prefetches_are_those_of_the_innermost_loop_that_moves_the_load() -> None:
    """The loop over the sum moves what a copy in it reads. Its tail is no loop, and the innermost loop of the launch moves the other
    operand, so the copy in the tail prefetches nothing."""
    chain = (("UPCAST", "o1", 16), ("SWAP", "o0", "o1"), ("TILE", "r0", 4), ("STAGE", "s1", "r0"), ("PREFETCH", "p2", 4))
    text = tree("prefetches", data(24, 30) @ data(30, 48), *chain, target=AVX512)
    assert text.count("prefetch") == 1 and text.index("copy s1[16, 4]") < text.index("prefetch p2, 4") < text.index("tail of 2")


def test_parts_of_a_sum() -> None:
    """The second phase, which adds the parts of a sum, has separate loops: few parts are unrolled, more get a loop."""
    four = replace(AVX512, threads=4)
    assert tree("", data(34, 21).sum(0), ("THREAD", "r0", 2), target=four) == dedent("""\
        phase out, partial results, 2 parts of 17 positions
          launch once
            loop o0 (21)
              reduction
                loop r0 (34)
                  accumulate
        phase out, combined results
          launch once
            loop o0 by 16 (2), the last tile moved back
              reduction
                accumulate o0 16 × part 2""")
    many = tree("launch", data(340, 70).sum(0), ("THREAD", "r0", 20), target=replace(AVX512, threads=32))
    assert many[many.index("phase out, combined"):] == dedent("""\
        phase out, combined results
          launch o0 by 16 (5)
            reduction
              loop part (20)
                accumulate o0 16""")


def test_parts_of_a_sum_that_is_added_to_its_output() -> None:
    """No position is computed twice if the output is updated in place: positions of the last vector beyond the end are masked."""
    x = Tensor(np.zeros(21, np.float32))
    text = tree(None, x.assign(x + data(34, 21).sum(0)), ("THREAD", "r0", 2), target=replace(AVX512, threads=4))
    assert "moved back" not in text and "launch o0 by 16 (2)" in text


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=f"no pass is called 'tales': there are {', '.join(p.name for p in PASSES)}$"):
        loop_tree(state_of(data(5) + 1), "tales")


def test_each_pass_changes_some_tree() -> None:
    """Each pass changes the tree of at least one kernel."""
    states = [state_of(data(4, 70) @ data(70, 8), ("UPCAST", "o1", 8), ("UNROLL", "r0", 4)), state_of(data(3, 4096).sum(1)),
              state_of(conv(4, 4, 6, 5, padding=4)),
              state_of(data(8, 16) @ data(16, 16), ("LOCAL", "o0", 4), ("TILE", "r0", 4), ("STAGE", "s1", "r0"), ("PIPELINE", "r0", 2),
                       target=TOY), product_of_tiles(Opt("UNROLL", "r0.in2", 0)),
              state_of(data(4, 20).sum(1), ("GROUP", "r0", 5), target=TOY), state_of(data(40).sum(0), ("PREFETCH", "p1", 2))]
    names = ["", *[p.name for p in PASSES]]
    for before, after in pairwise(names):
        assert any(loop_tree(s, before) != loop_tree(s, after) for s in states), after


def test_a_pass_that_changes_nothing_leaves_linear_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that visits every loop and returns it unchanged does not change LINEAR."""
    seen: list[Loop] = []

    def same(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        def note(node: Loop) -> Loop:
            seen.append(node)
            return node
        every = partial(with_loops, note)
        return tuple([p._replace(launch=with_bodies(every, p.launch)) for p in phases])
    states = [state_of(data(4, 70) @ data(70, 8), ("UNROLL", "r0", 4)),
              state_of(conv(4, 4, 6, 3, padding=1), target=replace(AVX512, threads=2))]
    before = [lower(s).digest for s in states]
    monkeypatch.setattr("svod.core.tree.passes.PASSES", (*PASSES, TreePass("same", "nothing else", same)))
    assert [lower(s.copy()).digest for s in states] == before and seen
    assert loop_tree(states[0], "same") == loop_tree(states[0], PASSES[-1].name)
