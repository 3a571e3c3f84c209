"""JAX on the CPU: each case is one jitted function, and its operands are on the device before timing starts."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.peers.models import forward
from svod.bench.suites.cases import Case, load_model
from svod.config import changed_environment, set_default_environment
from svod.errors import UnsupportedError

set_default_environment(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="2")

import jax  # noqa: E402  # reads the variables set above at import
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402


class JaxPeer:
    """JAX as a peer. `threads` is the size of the CPU client's thread pool, which is created once per process."""

    name = "jax"
    version = str(jax.__version__)
    outputs = "a new array every run"

    def __init__(self, threads: int) -> None:
        with changed_environment(NPROC=str(threads)):      # the size of the client's pool
            self.device = jax.devices("cpu")[0]

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        if case.op == "model":
            model, layers = load_model(case.options["script"], case.options["kind"]), _JaxLayers()
            function: Callable[..., Any] = lambda x: forward(layers, case.options["script"], model, x)  # noqa: E731
        elif case.op in OPERATIONS:
            options, operation = case.options, OPERATIONS[case.op]
            function = lambda *values: operation(options, *values)  # noqa: E731
        else:
            raise UnsupportedError(f"{case.op} is not written for JAX")
        values = [jax.device_put(_value(a, o.dtype), self.device) for a, o in zip(operands, case.operands, strict=True)]
        jitted = jax.jit(function)
        last = [jax.block_until_ready(jitted(*values))]

        def step() -> None:
            last[0] = jax.block_until_ready(jitted(*values))
        return PreparedPeer(calls(step), lambda: np.asarray(last[0].astype(jnp.float32) if case.out_dtype == "bfloat16" else last[0]),
                            False, self.outputs)


def _value(array: Array, dtype: str) -> Any:
    return lax.bitcast_convert_type(jnp.asarray(array), jnp.bfloat16) if dtype == "bfloat16" else array


def _conv2d(x: Any, w: Any, stride: int, padding: int, groups: int = 1) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), ((padding, padding),) * 2, feature_group_count=groups)


def _max_pool2d(x: Any, kernel: int, stride: int, padding: int) -> Any:
    pads = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, kernel, kernel), (1, 1, stride, stride), pads)


def _layer_norm(x: Any, gain: Any, offset: Any, eps: float) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps) * gain + offset


def _rms_norm(x: Any, gain: Any, eps: float) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)).astype(x.dtype) * gain


def _attention(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    scores = (q @ jnp.swapaxes(k, -1, -2)) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores, -1) @ v


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "matmul": lambda options, a, b: jnp.matmul(a, b, preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else None),
    "linear_gelu": lambda options, x, w, b: jax.nn.gelu(x @ w.T + b, approximate=False),
    "conv2d": lambda options, x, w: _conv2d(x, w, **options),
    "softmax": lambda options, x: jax.nn.softmax(x, -1),
    "layer_norm": lambda options, x, gain, offset: _layer_norm(x, gain, offset, options["eps"]),
    "rms_norm": lambda options, x, gain: _rms_norm(x, gain, options["eps"]),
    "attention": lambda options, q, k, v: _attention(q, k, v),
    "sum": lambda options, x: x.sum(options["axis"]),
    "max": lambda options, x: x.max(options["axis"]),
    "max_pool2d": lambda options, x: _max_pool2d(x, **options),
    "gelu": lambda options, x: jax.nn.gelu(x, approximate=False),
    "axpy": lambda options, x, y: options["a"] * x + y,
    "transpose": lambda options, x: x.T,
    "heads_first": lambda options, x: jnp.swapaxes(x, 0, 1),
    "cast": lambda options, x: x.astype(options["to"]),
}


class _JaxLayers:
    """The layers of models as traced functions; weights become constants of the function."""

    def linear(self, x: Any, weight: Array, bias: Array) -> Any:
        return x @ weight.T + bias

    def conv2d(self, x: Any, weight: Array, stride: int, padding: int) -> Any:
        return _conv2d(x, weight, stride, padding)

    def batch_norm(self, x: Any, mean: Array, variance: Array, gain: Array, offset: Array, eps: float) -> Any:
        scale = gain / np.sqrt(variance + np.float32(eps))
        return x * scale[:, None, None] + (offset - mean * scale)[:, None, None]

    def layer_norm(self, x: Any, gain: Array, offset: Array, eps: float) -> Any:
        return _layer_norm(x, gain, offset, eps)

    def relu(self, x: Any) -> Any:
        return jax.nn.relu(x)

    def gelu(self, x: Any, approximate: str) -> Any:
        return jax.nn.gelu(x, approximate=approximate == "tanh")

    def softmax(self, x: Any) -> Any:
        return jax.nn.softmax(x, -1)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def max_pool2d(self, x: Any, kernel: int, stride: int, padding: int) -> Any:
        return _max_pool2d(x, kernel, stride, padding)

    def spatial_mean(self, x: Any) -> Any:
        return x.mean((2, 3))

    def split(self, x: Any, parts: int) -> Sequence[Any]:
        return list(jnp.split(x, parts, -1))

    def attention(self, query: Any, key: Any, value: Any, heads: int, width: int, causal: bool) -> Any:
        n, t, features = query.shape
        q, k, v = (p.reshape(n, t, heads, width).transpose(0, 2, 1, 3) for p in (query, key, value))
        return _attention(q, k, v, causal).transpose(0, 2, 1, 3).reshape(n, t, features)
