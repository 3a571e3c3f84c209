"""Seeded random numbers from Threefry-2x32, a counter-based generator. Element i of the n-th call is a function of (seed, n, i), built from
integer operations on IOTA. It is computed by the kernels that read it, not stored; a tensor that is read twice has the same numbers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; 20 rounds.
"""
from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from svod.core.graph import graph
from svod.core.graph.devices import device_of
from svod.core.graph.shapes import shape_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.errors import DTypeError
from svod.system.forksafe import remake_after_fork
from svod.tensor.base import DTypeLike, Shape, as_dtype, extents_argument
from svod.tensor.operations.losses import Losses
from svod.tensor.precision import is_half, rounded, widened

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF


class _Stream:
    """The random stream of the process: the seed, and the number of calls since it was set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)
        self.seed(0)

    def seed(self, seed: int) -> None:
        with self._lock:
            self._seed, self._calls = seed, 0

    def next_key(self, count: int = 1) -> tuple[int, int]:
        """The two 32-bit words of a new key: the two halves of the seed combined, and the number of the call. Counts `count` calls."""
        with self._lock:
            first, self._calls = self._calls, self._calls + count
            return (self._seed ^ (self._seed >> 32) * 0x9E3779B9) & _WORD, first & _WORD


_stream = _Stream()
_here = threading.local()       # `keys`: the source of this thread's keys inside `keys_from`; None for the stream


class RandomKeys:
    """The keys that a function draws during capture, if its random numbers are to be new in each run.

    `node`: a BUFFER with the two words of the first key, set before each run; `drawn`: the number of consecutive keys drawn so far."""

    def __init__(self) -> None:
        self.node: UOp | None = None
        self.drawn = 0

    def next_key(self) -> tuple[UOp, UOp]:
        """The two words of the next key, as nodes without axes."""
        if self.node is None:
            self.node = graph.buffer(dtypes.uint32, 2)
        seed, calls = (graph.reshape(graph.shrink(self.node, ((i, i + 1),)), ()) for i in (0, 1))
        self.drawn += 1
        return seed, graph.alu(Ops.ADD, calls, graph.full((), self.drawn - 1, dtypes.uint32))


class SeededKeys:
    """The keys of a separate generator with its own seed. `run`: the run's number, a uint32 node without axes, which makes the numbers
    of each run different. `stream`: distinguishes generators with the same seed."""

    def __init__(self, seed: int, run: UOp, stream: int = 0) -> None:
        self.seed, self.run, self.stream, self.drawn = seed, run, stream, 0

    def next_key(self) -> tuple[UOp, UOp]:
        """The two words of the next key, as nodes without axes."""
        word = (self.seed ^ (self.seed >> 32) * 0x9E3779B9) + self.stream * 0x85EBCA6B + self.drawn * 0xC2B2AE35
        self.drawn += 1
        return graph.full((), word & _WORD, dtypes.uint32), self.run


@contextmanager
def random_keys(fresh: bool) -> Iterator[RandomKeys]:
    """A context in which this thread draws keys that are set in each run, if `fresh`; otherwise it draws as outside of the context."""
    keys = RandomKeys()
    with keys_from(keys if fresh else getattr(_here, "keys", None)):
        yield keys


@contextmanager
def keys_from(keys: RandomKeys | SeededKeys | None) -> Iterator[None]:
    """A context in which this thread draws its random numbers from `keys`; None for the stream of the process."""
    outer = getattr(_here, "keys", None)
    _here.keys = keys
    try:
        yield
    finally:
        _here.keys = outer


def next_keys(count: int) -> tuple[int, int]:
    """The two words of the first of the next `count` keys, all of which are used up."""
    return _stream.next_key(count)


def threefry2x32(x0: UOp, x1: UOp, key: tuple[int, int] | tuple[UOp, UOp]) -> tuple[UOp, UOp]:
    """Generate two uint32 nodes of random bits from two uint32 nodes of counters and a key of two 32-bit words, numbers or nodes without
    axes."""
    shape = shape_of(x0)

    def word(value: int | UOp) -> UOp:
        if isinstance(value, UOp):
            return graph.broadcast(value, shape, "random numbers")
        return graph.full(shape, value & _WORD, dtypes.uint32)

    def rotate(x: UOp, bits: int) -> UOp:
        return graph.alu(Ops.OR, graph.alu(Ops.SHL, x, word(bits)), graph.alu(Ops.SHR, x, word(32 - bits)))

    first, second = map(word, key)
    schedule = (first, second, graph.alu(Ops.XOR, graph.alu(Ops.XOR, word(PARITY), first), second)) if isinstance(key[0], UOp) else \
        (first, second, word(PARITY ^ key[0] ^ key[1]))
    x0, x1 = graph.alu(Ops.ADD, x0, first), graph.alu(Ops.ADD, x1, second)
    for block in range(5):
        for bits in ROTATIONS[block % 2]:
            x0 = graph.alu(Ops.ADD, x0, x1)
            x1 = graph.alu(Ops.XOR, rotate(x1, bits), x0)
        x0 = graph.alu(Ops.ADD, x0, schedule[(block + 1) % 3])
        x1 = graph.alu(Ops.ADD, x1, graph.alu(Ops.ADD, schedule[(block + 2) % 3], word(block + 1)))
    return x0, x1


class Random(Losses):
    """The methods that make random tensors. The same seed and the same calls give the same numbers on every machine."""

    __slots__ = ()

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Restart the stream of random numbers from `seed` (up to 64 bits). A new process starts with seed 0."""
        _stream.seed(seed & 0xFFFFFFFFFFFFFFFF)

    @classmethod
    def _bits(cls, shape: Shape) -> tuple[Self, Self]:
        """Two independent words of 32 random bits per element, as flat uint32 tensors."""
        n = math.prod(shape)
        keys: RandomKeys | SeededKeys | None = getattr(_here, "keys", None)
        key = _stream.next_key() if keys is None else keys.next_key()
        index = graph.iota(n, dtypes.int64 if n >= 2 ** 31 else dtypes.int32)
        low = graph.cast(index, dtypes.uint32)
        if n >= 2 ** 32:
            high = graph.cast(graph.alu(Ops.SHR, index, graph.full((n,), 32, index.dtype)), dtypes.uint32)
        else:
            high = graph.full((n,), 0, dtypes.uint32)
        first, second = threefry2x32(low, high, key)
        return cls.from_uop(first), cls.from_uop(second)

    @classmethod
    def _unit(cls, words: tuple[Self, Self], bits: int) -> Self:
        """Random numbers uniform in [0, 1) with `bits` random bits: float32 for at most 24 bits, else float64 with 53."""
        high, low = words
        if bits <= 24:
            # an int32 of at most 24 bits is positive and exact in float32
            return (high >> (32 - bits)).cast(dtypes.int32).cast(dtypes.float32).mul(2.0 ** -bits)
        top = (high >> 5).cast(dtypes.int32).cast(dtypes.float64)
        return top.mul(2.0 ** 26).add((low >> 6).cast(dtypes.int32).cast(dtypes.float64)).mul(2.0 ** -53)

    @classmethod
    def rand(cls, *size: int | tuple[int, ...], dtype: DTypeLike = dtypes.default_float) -> Self:
        """Random numbers uniform in [0, 1): multiples of 2^-24 in float32, 2^-53 in float64, 2^-11 in float16, 2^-8 in bfloat16."""
        shape, kind = extents_argument("rand", *size), as_dtype(dtype)
        if not kind.is_float:
            raise DTypeError(f"rand of {kind.name}: use randint")
        bits = {dtypes.float64: 53, dtypes.float32: 24, dtypes.float16: 11, dtypes.bfloat16: 8}[kind]
        return cls._unit(cls._bits(shape), bits).cast(kind).reshape(shape)

    @classmethod
    def uniform(cls, *size: int | tuple[int, ...], low: float = 0.0, high: float = 1.0, dtype: DTypeLike = dtypes.default_float) -> Self:
        """Random numbers uniform in [low, high)."""
        kind = as_dtype(dtype)
        return rounded(widened(cls.rand(*size, dtype=kind)).mul(float(high - low)).add(float(low)), kind)

    @classmethod
    def randn(cls, *size: int | tuple[int, ...], dtype: DTypeLike = dtypes.default_float) -> Self:
        """Random numbers of the standard normal distribution, by Box and Muller (1958): sqrt(-2 ln u) · cos(2π v)."""
        shape, kind = extents_argument("randn", *size), as_dtype(dtype)
        if not kind.is_float:
            raise DTypeError(f"randn of {kind.name}: it takes a float dtype")
        words = cls._bits(shape)
        if kind == dtypes.float64:
            # 53 bits need both words, so the angle needs a second call
            radius, angle = cls._unit(words, 53), cls._unit(cls._bits(shape), 53)
        else:
            radius, angle = cls._unit(words, 24), cls._unit(words[::-1], 24)
        # 1 - u is in (0, 1], where the logarithm is finite
        normal = (1.0 - radius).log().mul(-2.0).sqrt().mul(angle.mul(2 * math.pi).cos())
        return normal.cast(kind).reshape(shape)

    @classmethod
    def normal(cls, *size: int | tuple[int, ...], mean: float = 0.0, std: float = 1.0, dtype: DTypeLike = dtypes.default_float) -> Self:
        """Random numbers of a normal distribution with the given mean and standard deviation."""
        kind = as_dtype(dtype)
        return rounded(cls.randn(*size, dtype=dtypes.float32 if is_half(kind) else kind).mul(float(std)).add(float(mean)), kind)

    @classmethod
    def randint(cls, low: int, high: int | None = None, size: int | tuple[int, ...] = (), *, dtype: DTypeLike = dtypes.default_int) -> Self:
        """Random integers in [low, high), or [0, low) with one bound. The probability of each value is exact to 2^-32 (2^-63 beyond 32
        bits)."""
        first, last = (0, low) if high is None else (low, high)
        shape, kind = extents_argument("randint", size), as_dtype(dtype)
        if not kind.is_int or not kind.min <= first < last <= kind.max + 1:
            raise DTypeError(f"randint from {first} to {last} as {kind.name}: give an integer dtype and a range in it that is not empty")
        top, bottom = cls._bits(shape)
        span = last - first
        wide = top.cast(dtypes.uint64)
        if span <= 2 ** 32:
            offset = wide.mul(span) >> 32
        elif span < 2 ** 64:
            offset = ((wide << 32) | bottom.cast(dtypes.uint64)).remainder(span)
        else:
            offset = (wide << 32) | bottom.cast(dtypes.uint64)
        # modulo 2^64 the sum is right for either sign of `first`
        return offset.add(first % 2 ** 64).cast(kind).reshape(shape)

    def rand_like(self, dtype: DTypeLike | None = None) -> Self:
        """Random numbers of `rand` with this shape and dtype, on this device."""
        return self._on_own_device(self.rand(self.shape, dtype=self.dtype if dtype is None else dtype))

    def randn_like(self, dtype: DTypeLike | None = None) -> Self:
        """Random numbers of `randn` with this shape and dtype, on this device."""
        return self._on_own_device(self.randn(self.shape, dtype=self.dtype if dtype is None else dtype))

    def _on_own_device(self, drawn: Self) -> Self:
        """Copy random numbers to the device of self if they are elsewhere: keys that are set in each run are in memory of the CPU."""
        return drawn if device_of(drawn.uop) in (None, self.device) else self.from_uop(graph.copy(drawn.uop, self.device))
