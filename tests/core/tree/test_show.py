"""Loop nests as text: the docstring's example, every kind of loop and phase, and every kernel of the corpus under many chains."""
from __future__ import annotations

import random
from textwrap import dedent

import pytest

from svod.core.cost.sketch import heuristic, sketches
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree import show
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.chains import random_opt
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import an_eighth

TARGET = Target("x86_64", "znver5", ("avx512f", "fma"), 64, 32, 48 << 10, 1 << 20, 32 << 20, 2, has_mask_registers=True)


def nest(tensor: Tensor, *chain: tuple[object, ...]) -> str:
    state = Scheduler(Kernel(kernel_of(tensor)), TARGET)
    return show.print_nest(apply_opts(state, (Opt.from_json(list(o)) for o in chain)))


def text(block: str) -> str:
    return dedent(block).strip("\n")


def test_untouched_gemm() -> None:
    assert nest(data(17, 23) @ data(23, 19)) == text("""
        phase 0: out → p0
          for o0 in 0…17
            for o1 in 0…19
              acc = 0
              reduce r0 in 0…23
                acc += p1[23·o0 + r0] · p2[19·r0 + o1]
              p0[19·o0 + o1] = acc
        """)


def test_tiled_gemm_with_a_packed_operand() -> None:
    chain = (("UPCAST", "o0", 8), ("UPCAST", "o1", 32), ("ORDER", "out", ["o1", "o0"]), ("STAGE", "s1", "o1"), ("UNROLL", "r0", 4),
             ("THREAD", "o1", 2))
    assert nest(data(64, 256) @ data(256, 512), *chain) == text("""
        phase 0: out → p0, on 2 cores
          parallel o1 in 0…512 by 32
            copy s1[32, 256], laid out in the order it is read:
              for j in 0…256 by 4
                tile i 32 (vector) × j 4
                s1[i, j] = p2[512·j + i]
            for o0 in 0…64 by 8
              tile o0 8 × o1 32 (vector)
              unroll r0 4
              acc = 0
              reduce r0 in 0…256 by 4
                acc += p1[256·o0 + r0] · s1[o1, r0]
              p0[512·o0 + o1] = acc
        """)


def test_docstring_example_of_a_phase_of_its_own() -> None:
    a = Scheduler(Kernel(kernel_of(data(64, 256).linear(data(512, 256)))), TARGET)
    chain = (Opt("UPCAST", "o0", 8), Opt("UPCAST", "o1", 32), Opt("STAGE", "s1", "root"), Opt("THREAD", "o1", 2))
    found = show.print_nest(apply_opts(a, chain))
    assert show.__doc__ is not None
    example = dedent(show.__doc__.split("THREAD(o1, 2)\n\n")[1].split("\n\n")[0])
    # the weights of the example are constants of a plan, so they are packed once and not by both cores in every run
    assert found == example.replace(", once at prepare", ", on 2 cores")


def test_softmax_rows_and_their_stages() -> None:
    found = nest(data(5, 37).softmax(-1), ("STAGE", "s2", "o0"), ("UPCAST", "s1.r0", 16))
    assert "stage s1 in a register:" in found and "acc = -inf" in found and "acc = max(acc, " in found
    assert """
    copy s2[1, 37], laid out in the order it is read:
      for j in 0…37 by 16, the last tile moved back
        tile j 16 (vector)
        s2[i, j] = exp(p1[37·i + j] - s1[i])
""" in found
    assert "tile s1.r0 16 (vector)" in found and "reduce s1.r0 in 0…37 by 16" in found
    assert found.index("stage s1") < found.index("copy s2") < found.index("stage s3") < found.index("p0[")


def test_reduction_cut_over_cores() -> None:
    assert nest(data(34, 21).sum(0), ("THREAD", "r0", 2)) == text("""
        phase 0: out, partial results, on 2 cores
          parallel part of r0 in 0…2
            for o0 in 0…21
              acc = 0
              reduce r0 in its part of 0…34
                acc += p1[21·r0 + o0]
              partial[part] of out = acc
        phase 1: out → p0, combines 2 partial results
          for o0 in 0…21 by 16, the last tile moved back
            tile o0 16 (vector)
            unroll part 2
            acc = 0
            acc += partial[part] of out
            p0[o0] = acc
        """)


def test_reduce_loop_outside_an_output_loop() -> None:
    found = nest(data(17, 23) @ data(23, 19), ("ORDER", "out", ["r0", "o1"]))
    assert found == text("""
        phase 0: out → p0
          for o0 in 0…17
            acc = 0
            reduce r0 in 0…23
              for o1 in 0…19
                acc += p1[23·o0 + r0] · p2[19·r0 + o1]
            for all o1: p0[19·o0 + o1] = acc
        """)


def test_padding_masks_and_streaming() -> None:
    assert "for o0 in 0…16   (padded from 13)" in nest(data(13, 29) @ data(29, 3), ("PADTO", "o0", 16))
    assert " if inside else 0" in nest(data(1, 3, 9, 9).conv2d(data(5, 3, 3, 3), padding=1))
    assert "stored past the caches" in nest(data(64) + data(64), ("UPCAST", "o0", 16), ("STREAM", "out"))
    assert "stored past the caches" not in nest(data(64) + data(64), ("STREAM", "out")), "single elements are stored as always"
    assert "p1 prefetched 8 iterations ahead" in nest(data(50) + data(50), ("PREFETCH", "p1", 8))


def test_a_split_axis_counts_inside_its_tile() -> None:
    found = nest(data(64, 32) + data(64, 32), ("TILE", "o0", 64), ("UPCAST", "o0.in", 16))
    assert "for o0 in 0…2048 by 64" in found and "for o0 in 0…64 by 16" in found and "tile o0 16 (vector)" in found


def test_long_values_are_shortened() -> None:
    x = data(40)
    for _ in range(30):
        x = (x * 2.0 + 1.0).exp()
    found = nest(x)
    assert "… + 1" in found.splitlines()[-1] and len(found.splitlines()[-1]) < 160


@pytest.mark.parametrize("name", an_eighth(CORPUS))
def test_every_kernel_of_the_corpus_under_many_chains(name: str) -> None:
    """Every reachable state can be shown, and the text contains every loop of the state."""
    base = Scheduler(Kernel(CORPUS[name]()), TARGET)
    rng = random.Random(name)
    states = [base, heuristic(base), *sketches(base)]
    for state in list(states)[:3]:
        for _ in range(12):
            try:
                state = apply_opt(state, random_opt(rng, state))
                states.append(state)
            except KernelOptError:
                continue
    for state in states:
        try:
            found = show.print_nest(state)
        except KernelOptError:      # placements that do not go together: the search drops such states as well
            continue
        assert found.startswith("phase 0: ") and max(map(len, found.splitlines())) < 400
        store = state.kernel.stages[state.kernel.output]
        assert f"p{state.kernel.outs[0]}[" in found, f"{store.name} is not stored"
