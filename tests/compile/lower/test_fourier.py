"""FOURIER: transforms by mixed radices give NumPy's results, for all lengths with small prime factors, in rows, columns and by passes."""
from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from svod.compile.lower.library import lower_library_kernel
from svod.compile.lower.linear import validate
from svod.core.graph.library_kernel import fourier_passes, fourier_table, fourier_table_size, has_fourier
from svod.core.machine.target import Target
from svod.errors import UnsupportedError
from tests.agreement import Case, run_interpreted, run_native
from tests.compile.lower.test_library import NATIVE, kernel_of
from tests.compile.native import BASELINE, runnable_targets
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY

TARGETS = runnable_targets()
LENGTHS = [n for n in range(1, 400) if has_fourier(n)]


class Transform(Case):
    """A FOURIER on random numbers. Errors are small beside the numbers of a result, not beside each."""

    def __init__(self, outer: int, n: int, inner: int, dtype: str, inverse: bool) -> None:
        rng = np.random.default_rng((n, outer, inner))
        pairs_in, pairs_out = bool(rng.integers(2)), bool(rng.integers(2))
        shape, size = (outer, n, inner), fourier_table_size(n)
        parts = [(*shape, 2)] if pairs_in else [shape] * 2
        super().__init__(kernel_of("FOURIER", (inverse, pairs_in, pairs_out), dtype, [*parts, (size,)], [dtype] * (len(parts) + 1)))
        x = rng.standard_normal((2, *shape)).astype(dtype)
        given = [np.moveaxis(x, 0, -1)] if pairs_in else list(x)
        self.args[1:] = [*[part.reshape(-1) for part in given], fourier_table(n, inverse).astype(dtype)]
        z = x[0] + 1j * x[1].astype(np.float64)
        y = np.fft.ifft(z, axis=1, norm="forward") if inverse else np.fft.fft(z, axis=1)
        self.exact = np.stack([y.real, y.imag], -1 if pairs_out else 0).reshape(-1)
        self.most = np.finfo(dtype).eps * np.sqrt(n) * (4 + 2 * np.log2(n))

    def check(self, args: Sequence[np.ndarray[Any, Any]], what: str) -> None:
        error = np.abs(args[0].astype(np.float64) - self.exact).max()
        assert error <= self.most, f"{what}: {error}, at most {self.most}"


class TurnedTransform(Transform):
    """A TURNED_FOURIER on random numbers and factors."""

    def __init__(self, outer: int, n: int, inner: int, dtype: str, inverse: bool) -> None:
        rng = np.random.default_rng((n, outer, inner))
        pairs_out = bool(rng.integers(2))
        shapes: list[tuple[int, ...]] = [*[(outer, inner, n)] * 2, (fourier_table_size(n),), *[(inner, n)] * 2]
        Case.__init__(self, kernel_of("TURNED_FOURIER", (inverse, pairs_out), dtype, shapes, [dtype] * 5))
        x, factors = rng.standard_normal((2, outer, inner, n)).astype(dtype), rng.standard_normal((2, inner, n)).astype(dtype)
        self.args[1:] = [part.reshape(-1) for part in (*x, fourier_table(n, inverse).astype(dtype), *factors)]
        z = (x[0] + 1j * x[1].astype(np.float64)) * (factors[0] + 1j * factors[1].astype(np.float64))
        y = (np.fft.ifft(z, axis=2, norm="forward") if inverse else np.fft.fft(z, axis=2)).swapaxes(1, 2)
        self.exact = np.stack([y.real, y.imag], -1 if pairs_out else 0).reshape(-1)
        self.most = np.finfo(dtype).eps * np.sqrt(n) * (8 + 4 * np.log2(n))


class Filter(Case):
    """A FILTER of random rows with random factors, those of a transform of real numbers."""

    def __init__(self, outer: int, n: int, channels: int, dtype: str, before: int, step: int, size: int, results: int) -> None:
        rng = np.random.default_rng((n, outer, channels))
        shapes = [(outer, channels, size), *[(fourier_table_size(n),)] * 2, *[(channels, n)] * 2]
        super().__init__(kernel_of("FILTER", (before, step, results), dtype, shapes, [dtype] * 5))
        x, factors = rng.standard_normal((outer, channels, size)).astype(dtype), np.fft.fft(rng.standard_normal((channels, n)))
        tables = [fourier_table(n, inverse).astype(dtype) for inverse in (False, True)]
        self.args[1:] = [part.reshape(-1) for part in (x, *tables, factors.real.astype(dtype), factors.imag.astype(dtype))]
        rows = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (before, results + 2 * n)])
        blocks = [np.fft.ifft(np.fft.fft(rows[..., at:at + n]) * factors, norm="forward").real for at in range(0, results, step)]
        self.exact = np.concatenate([block[..., :step] for block in blocks], -1)[..., :results].reshape(-1)
        self.most = np.finfo(dtype).eps * n * np.sqrt(n) * (8 + 4 * np.log2(n))

    check = Transform.check


class Unpaired(Case):
    """An UNPAIRED of the transforms of the pairs of random real rows."""

    def __init__(self, outer: int, half: int, dtype: str, pairs_out: bool) -> None:
        rng = np.random.default_rng((outer, half))
        super().__init__(kernel_of("UNPAIRED", (pairs_out,), dtype, [*[(outer, half)] * 2, *[(half + 1,)] * 2], [dtype] * 4))
        x, turns = rng.standard_normal((outer, 2 * half)), np.exp(-1j * np.pi * np.arange(half + 1) / half)
        z = np.fft.fft(x[:, ::2] + 1j * x[:, 1::2])
        self.args[1:] = [part.astype(dtype).reshape(-1) for part in (z.real, z.imag, turns.real, turns.imag)]
        y = np.fft.rfft(x)
        self.exact = np.stack([y.real, y.imag], -1 if pairs_out else 0).reshape(-1)
        self.most = 16 * np.finfo(dtype).eps * np.sqrt(half + 1)

    check = Transform.check


def random_filter(rng: random.Random, n: int) -> Filter:
    """A FILTER of n positions, with rows that end before, in and behind its last block."""
    step, results = rng.randint(1, n), rng.randint(1, 3 * n)
    return Filter(rng.choice((1, 2)), n, rng.choice((1, 3)), rng.choice(("float32", "float64")), rng.choice((0, rng.randint(0, 2 * n))),
                  max(step, results // 20 + 1), rng.randint(1, 3 * n), results)


KINDS = [Transform, TurnedTransform]


def test_passes_multiply_to_the_length() -> None:
    assert all(np.prod(fourier_passes(n)) == n for n in range(1, 20_000) if has_fourier(n))
    assert not has_fourier(17) and not has_fourier(2 * 23) and has_fourier(13 * 64)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [NATIVE, BASELINE], ids=["native", "baseline"])
def test_in_the_interpreter(target: Target, kind: type[Transform], inverse: bool) -> None:
    rng = random.Random(inverse)
    for n in (1, 2, 3, 4, 12, 13, 16, *rng.sample(LENGTHS, 8)):
        case = kind(rng.choice((1, 2, 3)), n, rng.choice((1, 1, 2, 5, 17)), rng.choice(("float32", "float64")), inverse)
        program = lower_library_kernel(case.kernel, target)
        validate(program)
        run_interpreted(case, program, 2)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_machine_code(target: Target, kind: type[Transform], inverse: bool) -> None:
    rng = random.Random(4 + inverse)
    for n in (1, 16, 20, 1000, 1024, *rng.sample(LENGTHS, 6)):
        case = kind(rng.choice((1, 2, 5)), n, rng.choice((1, 1, 3, 16, 21)), rng.choice(("float32", "float64")), inverse)
        run_native(case, lower_library_kernel(case.kernel, target), target, 2)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_by_passes_on_groups(kind: type[Transform], inverse: bool) -> None:
    rng = random.Random(2 + inverse)
    for n in (1, 2, 15, 64, *rng.sample(LENGTHS, 4)):
        case = kind(rng.choice((1, 2)), n, rng.choice((1, 3)), "float32", inverse)
        program = lower_library_kernel(case.kernel, TOY)
        validate(program)
        args = case.fresh()
        run_program(program, args)
        case.check(args, f"groups, {n} positions")


@pytest.mark.parametrize("target", [NATIVE, BASELINE], ids=["native", "baseline"])
def test_filters_in_the_interpreter(target: Target) -> None:
    rng = random.Random(7)
    for n in (1, 13, 16, 36, 64, *rng.sample(LENGTHS[:80], 6)):
        case = random_filter(rng, n)
        program = lower_library_kernel(case.kernel, target)
        validate(program)
        run_interpreted(case, program, 2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_machine_code_of_filters(target: Target) -> None:
    rng = random.Random(8)
    for n in (1, 20, 40, 1000, 1024, *rng.sample(LENGTHS, 8)):
        case = random_filter(rng, n)
        run_native(case, lower_library_kernel(case.kernel, target), target, 2)


@pytest.mark.parametrize("pairs_out", [False, True])
def test_real_rows_from_their_pairs(pairs_out: bool) -> None:
    for half in (1, 2, 5, 16, 17, 33, 67):
        for outer, dtype in ((1, "float32"), (3, "float64")):
            case = Unpaired(outer, half, dtype, pairs_out)
            for target in (NATIVE, BASELINE):
                program = lower_library_kernel(case.kernel, target)
                validate(program)
                run_interpreted(case, program, 2)
            for target in TARGETS.values():
                run_native(case, lower_library_kernel(case.kernel, target), target, 2)
            program, args = lower_library_kernel(case.kernel, TOY), case.fresh()
            validate(program)
            run_program(program, args)
            case.check(args, f"groups, {half} pairs")


def test_filters_are_for_cpus() -> None:
    with pytest.raises(UnsupportedError, match="it is for CPUs"):
        lower_library_kernel(random_filter(random.Random(0), 40).kernel, TOY)
