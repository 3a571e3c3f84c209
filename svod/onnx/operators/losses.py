"""Losses, forward only."""
from __future__ import annotations

from svod.onnx.registry import Node, operator
from svod.tensor import Tensor


@operator("NegativeLogLikelihoodLoss", 12)
def nll_loss(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return likelihood(node, x, target, weight)


def likelihood(node: Node, logs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """The mean divides by the sum of the weights of the positions that are not ignored."""
    ignored, reduction = node.get("ignore_index"), node.get("reduction", "mean")
    keep = None if ignored is None else target.ne(ignored)
    at = target if keep is None else target.masked_fill(target.eq(ignored), 0)
    loss = logs.gather(1, at.unsqueeze(1).cast("int64")).squeeze(1).neg()
    share = Tensor.ones(*target.shape, dtype=logs.dtype) if weight is None else weight.take(at.cast("int64"), 0)
    if keep is not None:
        share = share.mul(keep.cast(share.dtype))
    loss = loss.mul(share)
    if reduction == "none":
        return loss.cast(logs.dtype)
    total = loss.sum()
    if reduction == "sum":
        return total.cast(logs.dtype)
    return total.div(share.sum()).cast(logs.dtype)


@operator("SoftmaxCrossEntropyLoss", 12)
def cross_entropy(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logs = x.log_softmax(1)
    return likelihood(node, logs, target, weight), logs
