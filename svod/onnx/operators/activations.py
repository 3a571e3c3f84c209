"""Activations: relu and similar functions, and softmax."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from svod.errors import UnsupportedError
from svod.onnx.operators.elementwise import unary
from svod.onnx.registry import Array, OnnxNode, axis_in, operator
from svod.tensor import Tensor, where

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "Sigmoid": Tensor.sigmoid, "Softplus": lambda x: x.softplus(threshold=math.inf), "Softsign": Tensor.softsign,
    "Mish": Tensor.mish, "HardSwish": Tensor.hardswish}

for _name, _function in _PLAIN.items():
    unary(_name, _function)
unary("Relu", Tensor.relu, exact=True)


def _number(value: float) -> float:
    """Convert a 32-bit float attribute to the shortest decimal number that rounds to it, such as 0.1."""
    return float(str(np.float32(value)))


def with_numbers(name: str, function: Callable[..., Tensor], since: int = 1, **defaults: float) -> None:
    """Register an operator that calls `function` with the node's operands and then its float attributes, in the order of `defaults`."""
    @operator(name, since)
    def compute(node: OnnxNode, *operands: Tensor) -> Tensor:
        return function(*operands, *(_number(node.get(attribute, value)) for attribute, value in defaults.items()))


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """The hard sigmoid: alpha · x + beta, clamped to 0 … 1."""
    return x.mul(alpha).add(beta).clamp(0.0, 1.0)


def swish(x: Tensor, alpha: float) -> Tensor:
    """The swish function x · sigmoid(alpha · x)."""
    return x.mul(x.mul(alpha).sigmoid())


with_numbers("LeakyRelu", Tensor.leaky_relu, alpha=0.01)
with_numbers("Elu", Tensor.elu, alpha=1.0)
with_numbers("Celu", Tensor.celu, 12, alpha=1.0)
with_numbers("HardSigmoid", hard_sigmoid, alpha=0.2, beta=0.5)
with_numbers("Swish", swish, 24, alpha=1.0)
with_numbers("SwiGLU", lambda gate, x, alpha: swish(gate, alpha).mul(x), 27, alpha=1.0)
with_numbers("ThresholdedRelu", lambda x, alpha: where(x.gt(alpha), x, 0), alpha=1.0)
with_numbers("Shrink", lambda x, bias, edge: where(x.lt(-edge), x.add(bias), where(x.gt(edge), x.sub(bias), 0)).cast(x.dtype), 9,
             bias=0.0, lambd=0.5)


@operator("Selu")
def selu(node: OnnxNode, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return (where(x.gt(0), x, x.exp().sub(1).mul(alpha))).mul(gamma)


@operator("Gelu", 20)
def gelu(node: OnnxNode, x: Tensor) -> Tensor:
    return x.gelu(node.get("approximate", "none"))


@operator("PRelu")
def prelu(node: OnnxNode, x: Tensor, slope: Tensor) -> Tensor:
    if slope.ndim == 1 and node.version < 7:
        slope = slope.reshape(-1, *(1,) * (x.ndim - 2))
    return where(x.lt(0), x.mul(slope), x).cast(x.dtype)


# -- rows ----------------------------------------------------------------------------------------------------------------------
def rows(name: str, function: Callable[[Tensor, int], Tensor], exact: bool = False) -> None:
    @operator(name, exact=exact)
    def flattened(node: OnnxNode, x: Tensor) -> Tensor:
        """Apply the function to rows: before opset 13, all axes from `axis` on formed one row."""
        axis = axis_in(node.get("axis", 1), max(1, x.ndim))
        return function(x.reshape(int(np.prod(x.shape[:axis])), -1), -1).reshape(x.shape)

    @operator(name, 13, exact=exact)
    def along(node: OnnxNode, x: Tensor) -> Tensor:
        return function(x, node.get("axis", -1))


def hardmax_of(x: Tensor, axis: int) -> Tensor:
    at = axis_in(axis, x.ndim)
    if 0 in x.shape:
        return x
    positions = Tensor.arange(x.shape[at]).reshape(*(-1 if i == at else 1 for i in range(x.ndim)))
    return positions.eq(x.argmax(at, keepdim=True)).cast(x.dtype)


rows("Softmax", Tensor.softmax)
rows("LogSoftmax", Tensor.log_softmax)
rows("Hardmax", hardmax_of, exact=True)


@operator("Dropout", known=("training",), exact=True)
def dropout(node: OnnxNode, x: Tensor, ratio: Tensor | None = None, training: Array | None = None) -> tuple[Tensor, Tensor]:
    """The identity, because svod runs models and does not train them."""
    if training is not None and bool(training.any()):
        raise UnsupportedError(f"{node} in training mode: svod runs models and does not train them")
    return x, Tensor.full(x.shape, True, "bool")
