"""A sample of the operators on this machine's adapter. `pytest --device WEBGPU tests/tensor` tests all of them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.lower.lower import lower
from svod.compile.webgpu.render import render
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import Array
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.errors import TuneError, UnsupportedError

CONFIG = PrepareConfig(device="WEBGPU", db=":none:")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((7, 13)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.1)
W, IMAGE, FILTER = (RNG.standard_normal(shape).astype(np.float32) for shape in ((13, 5), (1, 3, 9, 11), (4, 3, 3, 3)))
N = RNG.integers(-100, 100, (7, 13))
LONG = RNG.standard_normal((3, 6000)).astype(np.float32)
WIDE = N.astype(np.int64) * (1 << 40) + 3
AMOUNTS = np.resize([3, 64, 2**32, 2**40 + 1, -1, -2**63], N.shape)
ROWS = np.array([[6, 0, -1, 3]] * 13).T


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def layer_norm(x: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5))


def convolution(x: Array, w: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    return np.einsum("nchwij,ocij->nohw", windows, w)


CASES: dict[str, tuple[Callable[[], Tensor], Callable[[], Any]]] = {
    "functions": (lambda: Tensor(X).exp() + Tensor(X).sin() * Tensor(X).tanh() - Tensor(POSITIVE).log().sigmoid(),
                  lambda: np.exp(X) + np.sin(X) * np.tanh(X) - 1 / (1 + np.exp(-np.log(POSITIVE)))),
    "maxima": (lambda: Tensor(X).max(0) - Tensor(X).min(0), lambda: X.max(0) - X.min(0)),
    "sums": (lambda: Tensor(X).sum(1) / Tensor(X).mean(), lambda: X.sum(1) / X.mean()),
    "positions": (lambda: Tensor(X).argmax(1), lambda: X.argmax(1)),
    "softmax": (lambda: Tensor(X).softmax(-1), lambda: softmax(X)),
    "layer norm": (lambda: Tensor(X).layer_norm(13), lambda: layer_norm(X)),
    "product": (lambda: Tensor(X) @ Tensor(W), lambda: X @ W),
    "convolution": (lambda: Tensor(IMAGE).conv2d(Tensor(FILTER), stride=2, padding=1), lambda: convolution(IMAGE, FILTER)),
    "running sums": (lambda: Tensor(X).cumsum(1), lambda: X.cumsum(1)),
    "running sums of long rows": (lambda: Tensor(LONG).cumsum(1), lambda: LONG.astype(np.float64).cumsum(1).astype(np.float32)),
    "running maxima of long columns": (lambda: Tensor(LONG.T).cummax(0)[0], lambda: np.maximum.accumulate(LONG.T, 0)),
    "order": (lambda: Tensor(X).sort(1)[0], lambda: np.sort(X, 1)),
    "order of long rows": (lambda: Tensor(LONG).sort(1)[0], lambda: np.sort(LONG, 1)),
    "largest of long rows": (lambda: Tensor(LONG).topk(50)[0], lambda: np.sort(LONG, 1)[:, :-51:-1]),
    "running sums of columns": (lambda: Tensor(LONG).cumsum(0), lambda: LONG.cumsum(0)),
    "gather": (lambda: Tensor(X).gather(0, Tensor(ROWS)), lambda: np.take_along_axis(X, ROWS, 0)),
    "views": (lambda: Tensor(X).T[1:9:3].flip(0).pad(((0, 1), (2, 0))), lambda: np.pad(X.T[1:9:3][::-1], ((0, 1), (2, 0)))),
    "narrow integers": (lambda: Tensor(N.astype(np.int8)) * 3 + 7, lambda: N.astype(np.int8) * np.int8(3) + np.int8(7)),
    "floor division": (lambda: Tensor(N) // 7 + Tensor(N) % -5, lambda: N // 7 + N % -5),
    "wide integers": (lambda: Tensor(WIDE) * 5 - Tensor(WIDE) // 9, lambda: WIDE * 5 - WIDE // 9),
    "integers of another sign": (lambda: Tensor(N.astype(np.int8)).cast("uint64") - Tensor(N.astype(np.int32)).cast("uint32").cast("int64")
                                 .cast("uint64"), lambda: N.astype(np.int8).astype(np.uint64) - N.astype(np.uint32).astype(np.uint64)),
    "numbers beyond 32 bits": (lambda: Tensor.arange(2**33, 2**33 + 3) + Tensor.arange(0, 3 * 2**31 - 3, 2**31 - 1),
                               lambda: np.arange(2**33, 2**33 + 3) + np.arange(0, 3 * 2**31 - 3, 2**31 - 1)),
    "widened integers": (lambda: svod.where(Tensor(N.astype(np.int32)).cast("int64") < 5, Tensor(X), 0.0), lambda: np.where(N < 5, X, 0)),
    "unsigned numbers": (lambda: Tensor(X * 100).cast("uint32").cast("int64") + Tensor(X * 100).cast("uint64").cast("int64"),
                         lambda: (X * 100).astype(np.int64).astype(np.uint32).astype(np.int64) + (X * 100).astype(np.int64)),
    "shifts by any number": (lambda: (Tensor(WIDE) >> Tensor(AMOUNTS)) + (Tensor(WIDE) << Tensor(AMOUNTS)),
                             lambda: np.where(AMOUNTS == 3, (WIDE >> 3) + (WIDE << 3), WIDE >> 63)),
    "rounded numbers": (lambda: Tensor(N.astype(np.int32)) * 0 + Tensor(np.float64(-16777217.5)).cast("int32"),
                        lambda: np.full(N.shape, -16777217, np.int32)),
    "halves": (lambda: (Tensor(X.astype(np.float16)) * 3).sum(1).cast("float32"),
               lambda: (X.astype(np.float16) * np.float16(3)).sum(1, np.float32)),
    "doubles": (lambda: Tensor(X.astype(np.float64)).exp() @ Tensor(W.astype(np.float64)), lambda: np.exp(X.astype(np.float64)) @ W),
    "what is not read": (lambda: Tensor(X > 0) | True, lambda: np.ones(X.shape, bool)),
    "truth": (lambda: (Tensor(X) > 0) & ~(Tensor(N) > 3) | (Tensor(X) != Tensor(X)), lambda: (X > 0) & ~(N > 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, webgpu: Target) -> None:
    made, wanted = (f() for f in CASES[name])
    plan = made.prepare(CONFIG)
    plan.execute()
    got = plan.outputs[0].reshape(made.shape)
    assert got.dtype == np.asarray(wanted).dtype
    tolerance = {"halves": 4e-3, "doubles": 1e-12}.get(name, 2e-5)
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance if got.dtype.kind == "f" else 0)


@pytest.mark.parametrize("name", ["int64", "float64"])
def test_types_that_an_adapter_lacks_are_refused(name: str) -> None:
    target = Target(arch="wgsl", cpu="small", features=(), vector_bytes=16, vector_registers=64, l1=16 << 10, l2=1 << 20, l3=0, threads=1,
                    group_threads=256, shared_bytes=16 << 10, device="WEBGPU")
    call, = create_schedule(graph.sink((Tensor(X.astype(name)) * 2).uop)).calls
    with pytest.raises(UnsupportedError, match=f"{name} on WEBGPU: the adapter small has no .* cast to .*32, or run on the CPU"):
        render(lower(Scheduler(Kernel(call.ast), target)), target)


@pytest.mark.parametrize(("columns", "chain", "lanes", "refused"), [(65535, [], 8, False), (65537, [], 8, True), (65537, [], 0, False),
                                                                   (65537, [Opt("GROUP", "r0", 4)], 8, False)])
def test_loops_that_a_driver_in_software_ends_are_refused(columns: int, chain: list[Opt], lanes: int, refused: bool) -> None:
    target = Target(arch="wgsl", cpu="small", features=(), vector_bytes=16, vector_registers=64, l1=16 << 10, l2=1 << 20, l3=0, threads=1,
                    group_threads=256, shared_bytes=16 << 10, device="WEBGPU", software_lanes=lanes)
    call, = create_schedule(graph.sink(Tensor(np.zeros((2, columns), np.float32)).max(1).uop)).calls
    program = lower(apply_opts(Scheduler(Kernel(call.ast), target), chain))
    if refused:
        with pytest.raises(UnsupportedError, match=r"have 65537 iterations; the driver in software of WEBGPU ends them after 65535"):
            render(program, target)
    else:
        render(program, target)


@pytest.mark.slow
def test_the_end_of_each_loop_counts(webgpu: Target) -> None:
    if not webgpu.software_lanes:
        pytest.skip("the adapter is no driver in software")
    largest = [svod.kernel(Tensor(np.ones((2, n, 3, 50), np.float32)).max((1, 3)), config=CONFIG).untouched() for n in (1255, 1261)]
    sums = [svod.kernel(Tensor(np.ones((2, n, 3, 50), np.float32)).sum((1, 3)), config=CONFIG).untouched() for n in (1185, 1186)]
    assert largest[0].check().right                     # 1255 · (50 + 2)
    assert sums[0].check().right                        # 1185 · (50 + 5), 75 blocks of 16 and 5 of 256
    with pytest.raises(TuneError, match=r"have 6557[0-9] iterations"):
        largest[1].check()                              # 1261 · (50 + 1) would not be too many
    with pytest.raises(TuneError, match=r"have 6555[0-9] iterations"):
        sums[1].check()


def test_ranges_beyond_32_bits_are_refused(webgpu: Target) -> None:
    with pytest.raises(UnsupportedError, match="unset SVOD_DEVICE"):
        Tensor(X).pad(((0, 0), (2**32, 0))).max().prepare(CONFIG)
