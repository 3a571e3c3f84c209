"""The cost of a call from arrays to arrays, of svod.jit, ONNX files and PyTorch modules, beside other libraries: a small function, one with
a variable, a step of a decoder.

    python experiments/calls.py [--rounds N] [--peers onnx,jax,torch]

The function is `a * 2` over 4×8 float32: all time is the call's. All contestants are timed in turns, in rounds; the figures are medians
of microseconds per call with the middle half of the rounds. The decoder has two blocks, a key-value cache that it writes, and a position
that differs in each step; its native plan is the same launches without anything around them.
"""
from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import svod
from svod import Tensor, Variable, nn

Contestants = dict[str, tuple[Callable[[], object], int]]       # name: (call, calls of a sample)
WIDTH, HEADS, LENGTH, TOKENS = 256, 8, 256, 1000


def small_functions() -> Iterator[tuple[str, Callable[[], object], int]]:
    """svod's calls of `a * 2`."""
    x = np.ones((4, 8), np.float32)
    tensor = Tensor(x)
    double = svod.jit(lambda a: a * 2)
    result = double(x)
    (plan,) = double.plans
    n = Variable("n", 1, 100)
    scaled = svod.jit(lambda a, k: a * (Tensor(k) + 1))
    scaled(x, n.bind(1))
    values = itertools.cycle(range(1, 101))
    yield "the native plan", plan.execute, 2000
    yield "svod.jit, NumPy array", lambda: double(x), 500
    yield "svod.jit, svod tensor", lambda: double(tensor), 500
    yield "svod.jit, NumPy array, .numpy()", lambda: double(x).numpy(), 500
    yield "svod.jit, NumPy array and a bound variable", lambda: scaled(x, n.bind(next(values))), 500
    yield ".numpy() of the result", result.numpy, 2000
    yield "(Tensor(x) * 2).numpy(), a graph seen before", lambda: (Tensor(x) * 2).numpy(), 50


def with_onnx() -> Iterator[tuple[str, Callable[[], object], int]]:
    from onnx import helper as h
    from onnx import numpy_helper

    import svod.onnx
    x = np.ones((4, 8), np.float32)
    ends = [h.make_tensor_value_info(name, 1, [4, 8]) for name in ("a", "b")]
    graph = h.make_graph([h.make_node("Mul", ["a", "two"], ["b"])], "double", ends[:1], ends[1:],
                         [numpy_helper.from_array(np.float32(2), "two")])
    made = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=9)
    model = svod.onnx.load(made)
    model(x)
    yield "svod.onnx, NumPy array", lambda: model(x), 500
    session = svod.onnx.InferenceSession(made.SerializeToString())
    yield "svod.onnx.InferenceSession.run", lambda: session.run(None, {"a": x}), 500
    try:
        import onnxruntime
    except ImportError:
        print("onnxruntime is not installed")
        return
    theirs = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    yield "onnxruntime, session.run", lambda: theirs.run(None, {"a": x}), 500


def with_jax() -> Iterator[tuple[str, Callable[[], object], int]]:
    import jax
    x = np.ones((4, 8), np.float32)
    double = jax.jit(lambda a: a * 2)
    held = jax.numpy.asarray(x)
    double(x).block_until_ready()
    yield "jax.jit, NumPy array", lambda: double(x).block_until_ready(), 500
    yield "jax.jit, JAX array", lambda: double(held).block_until_ready(), 500
    yield "jax.jit, NumPy array, np.asarray", lambda: np.asarray(double(x)), 500


def with_torch() -> Iterator[tuple[str, Callable[[], object], int]]:
    import torch

    import svod.torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    x = torch.ones(4, 8)
    yield "torch, eager", lambda: x * 2, 500

    class Double(torch.nn.Module):
        def forward(self, a: Any) -> Any:
            return a * 2
    exported = svod.torch.compile(Double(), x)
    yield "svod.torch.compile, PyTorch tensor", lambda: exported(x), 500
    backend = torch.compile(Double(), backend="svod")
    backend(x)
    yield 'torch.compile(backend="svod")', lambda: backend(x), 500
    yield from with_many_weights()
    yield from with_caches()
    compiled = torch.compile(lambda a: a * 2)
    try:
        compiled(x)
    except Exception as error:      # no C++ compiler, which torch.compile needs
        print(f"torch.compile: {type(error).__name__}")
        return
    yield "torch.compile", lambda: compiled(x), 500


def with_many_weights() -> Iterator[tuple[str, Callable[[], object], int]]:
    """A module whose weights, 244 tensors, are looked at in every call."""
    import torch

    import svod.torch
    from svod.bench.suites.torch_modules import REAL, make
    try:
        model, args, _ = make("mobilenet_v3_small", REAL)
    except ImportError:
        print("torchvision is not installed")
        return
    exported, backend = svod.torch.compile(model, *args), torch.compile(model, backend="svod")
    exported(*args), backend(*args)
    (plan,) = exported.plans
    yield "MobileNet v3 small, the native plan", plan.execute, 20
    yield "MobileNet v3 small, svod.torch.compile", lambda: exported(*args), 20
    yield 'MobileNet v3 small, torch.compile("svod")', lambda: backend(*args), 20


def with_caches() -> Iterator[tuple[str, Callable[[], object], int]]:
    """A step of a PyTorch decoder of 12 layers of width 64, whose 24 key-value caches are buffers that it writes in place."""
    import torch

    import svod.torch

    class Layer(torch.nn.Module):
        def __init__(self, width: int = 64, heads: int = 4, length: int = 64) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(1, heads, length, width // heads))

        def forward(self, x: Any, at: Any) -> Any:
            _, heads, length, size = self.keys.shape
            q, k, v = self.qkv(self.norm(x)).view(3, 1, heads, 1, size)
            self.keys.index_copy_(2, at, k)
            self.values.index_copy_(2, at, v)
            seen = (torch.arange(length) <= at).view(1, 1, 1, length)
            attended = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
            x = x + self.out(attended.reshape(1, -1))
            return x + self.down(torch.relu(self.up(x)))

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(12))

        def forward(self, x: Any, at: Any) -> Any:
            for layer in self.layers:
                x = layer(x, at)
            return x
    x, at = torch.randn(1, 64), torch.tensor([3])
    exported = svod.torch.compile(Layers().eval(), x, at)
    exported(x, at)
    (plan,) = exported.plans
    yield "12 layers with caches, the native plan", plan.execute, 50
    yield "12 layers with caches, svod.torch.compile", lambda: exported(x, at), 50


class Decoder(nn.Module):
    """Two blocks with a cache each: one token in, the scores of the next one out."""

    def __init__(self) -> None:
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, token: Tensor, at: Any) -> Tensor:
        x = self.embedding(token)
        for block in self.blocks:
            x = block(x, at)
        return self.head(x).argmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.keys, self.values = (Tensor(np.zeros((1, HEADS, LENGTH, WIDTH // HEADS), np.float32)).clone().realize() for _ in range(2))

    def forward(self, x: Tensor, at: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(1, 3, HEADS, 1, WIDTH // HEADS).permute(1, 0, 2, 3, 4)
        self.keys[:, :, at:at + 1] = k
        self.values[:, :, at:at + 1] = v
        seen = self.keys[:, :, :at + 1], self.values[:, :, :at + 1]
        attended = q.scaled_dot_product_attention(*seen).permute(0, 2, 1, 3).reshape(1, WIDTH)
        x = x + self.out(attended)
        return x + self.down(self.up(self.norm2(x)).gelu())


def decoder() -> Iterator[tuple[str, Callable[[], object], int]]:
    model = Decoder()
    step = svod.jit(model)
    at = Variable("at", 0, LENGTH - 1)
    token = np.array([3], np.int32)
    step(token, at.bind(0))
    (plan,) = step.plans
    positions, places = itertools.cycle(range(LENGTH)), itertools.cycle(range(LENGTH))
    print(f"the decoder's step has {len(plan.kernels)} kernels")
    yield "the native plan of a step", lambda: plan.execute(at=next(positions)), LENGTH
    yield "a step", lambda: step(token, at.bind(next(places))), LENGTH
    yield "a step, .numpy()", lambda: step(token, at.bind(next(places))).numpy(), LENGTH


def race(contestants: Contestants, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each contestant, one figure per round. In each round all take a turn."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (call, times) in contestants.items():
            start = time.perf_counter()
            for _ in range(times):
                call()
            samples[name].append((time.perf_counter() - start) / times * 1e6)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--peers", default="onnx,jax,torch", help="with commas; those that are not installed are left out")
    arguments = parser.parse_args()
    sources = [small_functions]
    for name, make in (("onnx", with_onnx), ("jax", with_jax), ("torch", with_torch)):
        if name in arguments.peers.split(","):
            try:
                __import__(name)
            except ImportError:
                print(f"{name} is not installed")
                continue
            sources.append(make)
    sources.append(decoder)
    contestants = {name: (call, times) for source in sources for name, call, times in source()}
    samples = race(contestants, arguments.rounds)
    print(f"{'median µs':>58}   middle half")
    for name, found in samples.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name:<48}{middle:10.2f}   {low:.2f} … {high:.2f}")


if __name__ == "__main__":
    main()
