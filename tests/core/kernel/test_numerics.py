"""The canonical order of sums under the policy "same": where it comes from, and which opts keep it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.numerics import CanonicalSum, canonical_sum
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import SAME
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import conv, data, gemm, kernel_of

SAME_BITS = replace(AVX512, threads=4, numerics=SAME)


def order_of(tensor: Tensor) -> CanonicalSum | None:
    """The canonical order of the output of a tensor's last kernel."""
    kernel = Kernel(kernel_of(tensor))
    return canonical_sum(kernel, kernel.output)


@pytest.mark.parametrize(("build", "lanes"), [
    (lambda: gemm(8, 9, 100), 1), (lambda: data(100) @ data(100, 9), 1), (lambda: data(9, 100) @ data(100), 1),
    (lambda: data(9, 100).sum(1), 64), (lambda: data(9, 37).sum(1), 32), (lambda: data(9, 7).sum(1), 1), (lambda: data(100, 9).sum(0), 1),
    (lambda: data(3, 100, 9).sum(1), 1), (lambda: data(1000).sum(), 64), (lambda: (data(100) * data(100)).sum(), 64),
    (lambda: (data(9, 100) * data(9, 100)).sum(1), 64), (lambda: data(9, 100, dtype="float64").sum(1), 32), (lambda: conv(3, 8, 10, 3), 1),
    (lambda: data(2, 5, 64, 4).mean((2, 3)), 64)])
def test_lanes_follow_memory(build: Callable[[], Tensor], lanes: int) -> None:
    order = order_of(build())
    assert order is not None and order.lanes == lanes


@pytest.mark.parametrize("build", [lambda: data(9, 100).max(1), lambda: data(9, 100, dtype="int32").sum(1),
                                   lambda: data(10, 16, dtype="int8").cast("int32") @ data(16, 12, dtype="int8").cast("int32")])
def test_what_does_not_round_is_free(build: Callable[[], Tensor]) -> None:
    assert order_of(build()) is None


@pytest.mark.parametrize("build", [lambda n: data(n, 1000) @ data(1000, 9), lambda n: data(n, 5000).sum(1),
                                   lambda n: data(n, 64, 9, 9).conv2d(data(8, 64, 3, 3), padding=1)])
def test_the_order_does_not_depend_on_rows(build: Callable[[int], Tensor]) -> None:
    assert order_of(build(1)) == order_of(build(7)) == order_of(build(64)) is not None


def test_states_begin_with_their_lanes() -> None:
    """The accumulators of a sum along memory are no choice of a chain: the untouched kernel has them, whatever the vectors are."""
    kernel = Kernel(kernel_of(data(9, 100).sum(1)))
    for target in (AVX2, AVX512):
        state = Scheduler(kernel, replace(target, numerics=SAME))
        own = [r for r in state.rows if kernel.axes[r.axis].stage == kernel.output]
        assert [(r.name, r.extent, r.role) for r in own] == [("o0", 9, "loop"), ("r0", 2, "loop"), ("r0.in", 64, "upcast")]
        assert len(state.rows) == len(Scheduler(kernel, target).rows) + 1


ALLOWED: list[tuple[Callable[[], Tensor], list[tuple[str, str, object]]]] = [
    (lambda: gemm(8, 9, 96), [("UPCAST", "o0", 4), ("UPCAST", "o1", 9), ("UNROLL", "r0", 5)]),
    (lambda: gemm(8, 9, 96), [("TILE", "r0", 32), ("ORDER", "out", ("r0", "o0", "o1")), ("THREAD", "o0", 2)]),
    (lambda: gemm(8, 9, 1024), [("TILE", "r0", 128), ("UNROLL", "r0.in", 4), ("SWAP", "o0", "r0")]),
    (lambda: gemm(8, 9, 1024), [("TILE", "r0", 512)]),
    (lambda: data(9, 6400).sum(1), [("UNROLL", "r0", 4)]),
    (lambda: conv(64, 8, 10, 3), [("UNROLL", "r2", 0), ("UNROLL", "r1", 0), ("TILE", "r0", 16), ("PADTO", "o1", 3)]),
    (lambda: data(9, 100).max(1), [("UPCAST", "r0", 64), ("THREAD", "r0", 2)]),
]
REFUSED: list[tuple[Callable[[], Tensor], tuple[str, str, object], str]] = [
    (lambda: gemm(8, 9, 96), ("UPCAST", "r0", 4), "r0 has other accumulators"),
    (lambda: gemm(8, 9, 96), ("THREAD", "r0", 2), "its parts are added later"),
    (lambda: gemm(8, 9, 97), ("PADTO", "r0", 32), "it adds padding"),
    (lambda: gemm(8, 9, 1001), ("UNROLL", "r0", 2), "a remainder of r0 is added by itself"),
    (lambda: gemm(8, 9, 1000), ("UNROLL", "r0", 5), "blocks of the sum end within an iteration"),
    (lambda: conv(4, 8, 10, 3), ("SWAP", "r0", "r1"), "its axes are exchanged"),
    (lambda: conv(4, 8, 10, 3), ("UNROLL", "r0", 2), "its axes are exchanged"),
    (lambda: conv(64, 8, 10, 3), ("WINOGRAD", "out", 2), "the kernel is another one"),
    (lambda: data(9, 100).sum(1), ("UPCAST", "r0", 2), "r0 has other accumulators"),
]


@pytest.mark.parametrize("case", range(len(ALLOWED)))
def test_opts_that_keep_the_order(case: int) -> None:
    build, chain = ALLOWED[case]
    apply_opts(Scheduler(Kernel(kernel_of(build())), SAME_BITS), [Opt(*opt) for opt in chain])


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_opts_that_change_the_order(case: int) -> None:
    """Each refusal says what would change. Without the policy the same opts apply."""
    build, opt, reason = REFUSED[case]
    kernel = Kernel(kernel_of(build()))
    apply_opt(Scheduler(kernel, replace(SAME_BITS, numerics="float32")), Opt(*opt))
    with pytest.raises(KernelOptError, match=f"adds in another order than `numerics=same` allows: {reason}"):
        apply_opt(Scheduler(kernel, SAME_BITS), Opt(*opt))


def test_an_unrolled_part_is_inside_of_all_loops() -> None:
    state = apply_opt(Scheduler(Kernel(kernel_of(gemm(8, 9, 96))), SAME_BITS), Opt("TILE", "r0", 8))
    with pytest.raises(KernelOptError, match="an unrolled part is around a loop"):
        apply_opt(state, Opt("UNROLL", "r0", 2))


def test_the_policy_is_part_of_the_key() -> None:
    """Records of one policy are not used under another; the default has the key that it had before."""
    assert "numerics" not in AVX512.key and AVX512.allowing(True, True).key == AVX512.key
    assert "numerics=same" in AVX512.allowing(True, True, numerics=SAME).key.split("/")[2].split(",")
