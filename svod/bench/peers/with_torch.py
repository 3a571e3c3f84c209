"""PyTorch in eager mode, on the CPU, in inference mode."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from svod.bench.blocks.modules import in_double, make_block
from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.peers.models import forward
from svod.bench.suites.cases import Case, load_model
from svod.bench.suites.torch_modules import REAL, leaves, make
from svod.errors import UnsupportedError

Tensor = Any        # stands for torch.Tensor, because mypy also runs without torch


class TorchPeer:
    """PyTorch as a peer. An operation uses `threads` threads."""

    name = "torch"
    version = str(torch.__version__)
    outputs = "preallocated where the function takes out="

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        if case.op in ("torch", "blocks"):
            return prepared_module(case)
        tensors = [_tensor(a, o.dtype) for a, o in zip(operands, case.operands, strict=True)]
        if case.op == "model":
            model, layers = load_model(case.options["script"], case.options["kind"]), _TorchLayers()
            return _returning(lambda: forward(layers, case.options["script"], model, tensors[0]))
        if case.op in WRITING:
            out = torch.zeros(case.out_shape, dtype=getattr(torch, case.out_dtype))
            step = WRITING[case.op](case.options, out, *tensors)
            return PreparedPeer(calls(step), lambda: _array(out), True)
        if case.op in RETURNING:
            return _returning(RETURNING[case.op](case.options, *tensors))
        raise UnsupportedError(f"{case.op} is not written for torch")


def prepared_module(case: Case, compiled: Callable[[Any], Any] = lambda module: module) -> PreparedPeer:
    """Prepare a module of the suites torch and blocks, wrapped by `compiled`, called as its users do: arguments in, new outputs out."""
    torch.manual_seed(case.options["seed"])
    made = make_block(case.options["block"]) if case.op == "blocks" else make(case.name, REAL)
    module, args, kwargs = made
    function = compiled(module)
    last: list[Any] = []

    def run(times: int) -> None:
        with torch.inference_mode():
            for _ in range(times):
                last[:] = [function(*args, **kwargs)]

    def exact() -> list[Array]:
        double, inputs, others = in_double(made)
        with torch.inference_mode():
            outputs = [_array(t) for t in leaves(double(*inputs, **others))]
        if not all(np.isfinite(a).all() for a in outputs):
            raise UnsupportedError("the result is not finite")
        return outputs
    start = time.perf_counter()
    run(1)
    return PreparedPeer(run, lambda: [_array(t) for t in leaves(last[0])], False, prepare_seconds=time.perf_counter() - start,
                        exact=exact if case.op == "blocks" else None)


def _tensor(array: Array, dtype: str) -> Tensor:
    """A tensor that shares the array's memory."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> Array:
    return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def _returning(function: Callable[[], Tensor]) -> PreparedPeer:
    last: list[Tensor] = []

    def step() -> None:
        last[:] = [function()]
    return PreparedPeer(calls(step), lambda: _array(last[0]), False, "a new tensor every run")


def _matmul(options: Mapping[str, Any], out: Tensor, a: Tensor, b: Tensor) -> Callable[[], object]:
    if a.dtype == torch.int8:
        return lambda: torch._int_mm(a, b, out=out)
    return lambda: torch.matmul(a, b, out=out)


class _TorchLayers:
    """The layers of models, each a single call of PyTorch. Each weight is converted to a tensor once."""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[Array, Tensor]] = {}

    def weight(self, array: Array) -> Tensor:
        if id(array) not in self._weights:
            self._weights[id(array)] = array, torch.from_numpy(array)
        _, tensor = self._weights[id(array)]
        return tensor

    def linear(self, x: Tensor, weight: Array, bias: Array) -> Tensor:
        return functional.linear(x, self.weight(weight), self.weight(bias))

    def conv2d(self, x: Tensor, weight: Array, stride: int, padding: int) -> Tensor:
        return functional.conv2d(x, self.weight(weight), None, stride, padding)

    def batch_norm(self, x: Tensor, mean: Array, variance: Array, gain: Array, offset: Array, eps: float) -> Tensor:
        return functional.batch_norm(x, self.weight(mean), self.weight(variance), self.weight(gain), self.weight(offset), eps=eps)

    def layer_norm(self, x: Tensor, gain: Array, offset: Array, eps: float) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self.weight(gain), self.weight(offset), eps)

    def relu(self, x: Tensor) -> Tensor:
        return functional.relu(x)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        return functional.gelu(x, approximate=approximate)

    def softmax(self, x: Tensor) -> Tensor:
        return functional.softmax(x, -1)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def max_pool2d(self, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        return functional.max_pool2d(x, kernel, stride, padding)

    def spatial_mean(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def split(self, x: Tensor, parts: int) -> Sequence[Tensor]:
        return list(x.chunk(parts, -1))

    def attention(self, query: Tensor, key: Tensor, value: Tensor, heads: int, width: int, causal: bool) -> Tensor:
        n, t, features = query.shape
        q, k, v = (p.reshape(n, t, heads, width).transpose(1, 2) for p in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(n, t, features)


# operations that take a preallocated output
WRITING: Mapping[str, Callable[..., Callable[[], object]]] = {
    "matmul": _matmul,
    "softmax": lambda options, out, x: lambda: torch.softmax(x, -1, out=out),
    "sum": lambda options, out, x: lambda: torch.sum(x, options["axis"], out=out),
    "max": lambda options, out, x: lambda: torch.amax(x, options["axis"], out=out),
    "gelu": lambda options, out, x: lambda: torch._C._nn.gelu(x, approximate="none", out=out),
    "axpy": lambda options, out, x, y: lambda: torch.add(y, x, alpha=options["a"], out=out),
    "transpose": lambda options, out, x: lambda: out.copy_(x.t()),
    "heads_first": lambda options, out, x: lambda: out.copy_(x.transpose(0, 1)),
    "cast": lambda options, out, x: lambda: out.copy_(x),
}
# operations that return a new output
RETURNING: Mapping[str, Callable[..., Callable[[], Tensor]]] = {
    "linear_gelu": lambda options, x, w, b: lambda: functional.gelu(functional.linear(x, w, b)),
    "conv2d": lambda options, x, w: lambda: functional.conv2d(x, w, None, options["stride"], options["padding"], 1, options["groups"]),
    "layer_norm": lambda options, x, g, b: lambda: functional.layer_norm(x, (x.shape[-1],), g, b, options["eps"]),
    "rms_norm": lambda options, x, g: lambda: functional.rms_norm(x, (x.shape[-1],), g, options["eps"]),
    "attention": lambda options, q, k, v: lambda: functional.scaled_dot_product_attention(q, k, v),
    "max_pool2d": lambda options, x: lambda: functional.max_pool2d(x, options["kernel"], options["stride"], options["padding"]),
}
