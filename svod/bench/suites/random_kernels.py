"""The suite random: kernels of the kinds of the suite core, with extents drawn from a seed. A seed gives the same kernels on every machine.

Each kind is as frequent as in core: kinds are dealt from a shuffled deck, which is reshuffled when it is used up. Extents are spread evenly
on a logarithmic scale: a third are primes, a third are multiples of 16, a third stay as drawn. A case whose time at nominal rates is
outside `LEAST_SECONDS` … `MOST_SECONDS` is drawn again, so that a kernel takes 50 µs to 30 ms on a machine a quarter to four times as fast.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from svod.bench.suites import cases
from svod.bench.suites.cases import Case
from svod.core.ir.dtype import BY_NAME
from svod.errors import ConfigError

T = TypeVar("T")
RANDOM = "random"
RANDOM_COUNT = 20
FLOPS, BYTES = 3e11, 4e10                       # nominal rates per second: a processor of a few cores
LEAST_SECONDS, MOST_SECONDS = 200e-6, 7.5e-3    # bounds of a case's time at the nominal rates


class Draw:
    """A source of random numbers. It uses `Random.random` only, whose sequence is the same in every version of Python."""

    def __init__(self, seed: int | str) -> None:
        self._next = random.Random(seed).random

    def choice(self, *values: T) -> T:
        """One of the values at random."""
        return values[int(self._next() * len(values))]

    def extent(self, low: int, high: int) -> int:
        """A random number from about `low` to `high`, where `high` is at least 16."""
        n = round(math.exp(math.log(low) + math.log(high / low) * self._next()))
        kind = self._next()
        if kind < 1 / 3:
            return next((p for p in range(n, low - 1, -1) if is_prime(p)), n)
        return max(-(-low // 16), n // 16) * 16 if kind < 2 / 3 else n

    def shuffled(self, values: list[Kind]) -> list[Kind]:
        """The values in random order."""
        return [v for _, _, v in sorted((self._next(), i, v) for i, v in enumerate(values))]


Kind = Callable[[Draw], Case]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def random_cases(count: int, seed: int) -> list[Case]:
    """Draw `count` different cases of the suite random. Raises ConfigError for a count below 1."""
    if count < 1:
        raise ConfigError(f"{count} random kernels were requested; at least one is needed")
    draw = Draw(seed)
    drawn: dict[str, Case] = {}
    deck: list[Kind] = []
    while len(drawn) < count:
        if not deck:
            deck = draw.shuffled(DECK)
        kind = deck.pop()
        case = kind(draw)
        while case.name in drawn or not LEAST_SECONDS <= nominal_seconds(case) <= MOST_SECONDS:
            case = kind(draw)
        drawn[case.name] = replace(case, suite=RANDOM)
    return list(drawn.values())


def nominal_seconds(case: Case) -> float:
    """Seconds of a case at the nominal rates. Types half as wide are multiplied twice as fast."""
    return max(case.flops / FLOPS * min(4, BY_NAME[case.dtype].itemsize) / 4, (case.bytes_read + case.bytes_written) / BYTES)


def _name(kind: str, *extents: int) -> tuple[str, str]:
    """The name and the title of a kernel with these extents."""
    sizes = "×".join(map(str, extents))
    return f"random_{kind.replace(' ', '_')}_{sizes.replace('×', 'x')}", f"{kind} {sizes}"


def _gemm(d: Draw, dtype: str = "float32") -> Case:
    m, k, n = (d.extent(64, 2500) for _ in range(3))
    words, group = ("gemm", "gemm") if dtype == "float32" else (f"gemm {dtype}", "low precision")
    return cases.matmul(*_name(words, m, k, n), (m, k), (k, n), dtype, group=group)


def _linear_gelu(d: Draw) -> Case:
    m, k, n = d.extent(32, 1024), d.extent(64, 2048), d.extent(64, 4096)
    return cases.linear_gelu(*_name("linear gelu", m, k, n), m, k, n)


def _batched(d: Draw) -> Case:
    b, m, k, n = d.extent(2, 32), d.extent(32, 768), d.extent(32, 768), d.extent(32, 768)
    return cases.matmul(*_name("bmm", b, m, k, n), (b, m, k), (b, k, n))


def _gemv(d: Draw) -> Case:
    m, k = d.extent(512, 8192), d.extent(512, 8192)
    return cases.matmul(*_name("gemv", m, k), (m, k), (k,))


def _conv(d: Draw, kernel: int) -> Case:
    stride = d.choice(1, 1, 2)
    channels, outputs, size = d.extent(3, 384), d.extent(16, 384), d.extent(14, 160)
    name = _name(f"conv{kernel}x{kernel}{'_s2' if stride == 2 else ''}", channels, outputs, size)
    return cases.conv2d(*name, channels, outputs, kernel, size, stride)


def _depthwise(d: Draw) -> Case:
    channels, kernel, size, stride = d.extent(16, 512), d.choice(3, 5), d.extent(28, 256), d.choice(1, 1, 2)
    name = _name(f"depthwise{kernel}x{kernel}{'_s2' if stride == 2 else ''}", channels, size)
    return cases.conv2d(*name, channels, channels, kernel, size, stride, channels)


def _matrix(d: Draw, kind: str, make: Callable[[str, str, int, int], Case], least: int, most_columns: int) -> Case:
    rows, columns = d.extent(least, 8192), d.extent(least, most_columns)
    return make(*_name(kind, rows, columns), rows, columns)


def _attention(d: Draw) -> Case:
    heads, length, width = d.extent(2, 24), d.extent(64, 1024), d.choice(32, 64, 80, 128)
    return cases.attention(*_name("attention", heads, length, width), heads, length, width)


def _sum(d: Draw) -> Case:
    count = d.extent(1 << 20, 1 << 26)
    return cases.reduction(*_name("sum", count), "sum", (count,), 0)


def _sums(d: Draw, axis: int) -> Case:
    rows, columns = d.extent(64, 16384), d.extent(64, 16384)
    return cases.reduction(*_name("column sums" if axis == 0 else "row sums", rows, columns), "sum", (rows, columns), axis)


def _max_pool(d: Draw) -> Case:
    channels, size = d.extent(16, 512), d.extent(28, 256)
    return cases.max_pool2d(*_name("max pool", channels, size), channels, size)


def _vector(d: Draw, kind: str, make: Callable[[str, str, int], Case]) -> Case:
    count = d.extent(1 << 20, 1 << 25)
    return make(*_name(kind, count), count)


# each kind is in the deck as often as in the suite core
DECK: list[Kind] = [
    _gemm, _gemm, _gemm, _gemm, _linear_gelu, _batched, _gemv, lambda d: _conv(d, 3), lambda d: _conv(d, 1), lambda d: _conv(d, 7),
    _depthwise, lambda d: _matrix(d, "softmax", cases.softmax, 64, 8192), lambda d: _matrix(d, "layer norm", cases.layer_norm, 64, 4096),
    _attention, _sum, lambda d: _sums(d, 1), lambda d: _sums(d, 0), _max_pool, lambda d: _vector(d, "gelu", cases.gelu),
    lambda d: _vector(d, "axpy", cases.axpy), lambda d: _matrix(d, "transpose", cases.transpose, 256, 8192),
    lambda d: _gemm(d, "float16"), lambda d: _gemm(d, "bfloat16"), lambda d: _gemm(d, "int8"),
]
