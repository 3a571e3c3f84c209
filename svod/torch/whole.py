"""Keeps operations as a whole that PyTorch would decompose regardless of the given decompositions, although svod implements them.

    F.interpolate(x, size, None, "bilinear", False)   →   svod::interpolate(x, size, None, "bilinear", False)     in Dynamo's graph
    aten::gru.input(x, h, weights, …)                 →   svod::gru(x, h, weights, …)                             while PyTorch traces

AOT autograd does not decompose the operators of svod. PyTorch's decomposition of a resized image gathers four neighbours per pixel; svod
resizes one axis after the other. PyTorch decomposes a recurrent layer by tracing each step, 50 ms long, for one length of the sequence.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch.nn import functional

RESIZE_MODES = ("linear", "bilinear", "trilinear", "bicubic")
_SCHEMA = "(Tensor x, SymInt[]? size, float[]? scales, str mode, bool corners) -> Tensor"


def _resized(x: Any, size: Sequence[int] | None, scales: Sequence[float] | None, mode: str, corners: bool) -> Any:
    """PyTorch's implementation of the operator: for tracing shapes, and for graphs that PyTorch runs."""
    return functional.interpolate(x, size, scales, mode, corners)


_interpolate = torch.library.custom_op("svod::interpolate", _resized, mutates_args=(), schema=_SCHEMA)
_interpolate.register_fake(_resized)


def keep_whole(gm: Any) -> None:
    """Replace functions in one of Dynamo's graphs by operators of svod that AOT autograd does not decompose."""
    parameters = inspect.signature(functional.interpolate)
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and n.target is functional.interpolate]:
        given = parameters.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        a = given.arguments
        if a["mode"] not in RESIZE_MODES or a["antialias"] or a["recompute_scale_factor"]:
            continue
        spatial = a["input"].meta["example_value"].ndim - 2
        with gm.graph.inserting_before(node):
            kept = gm.graph.call_function(torch.ops.svod.interpolate.default, (
                a["input"], _each(a["size"], spatial), _each(a["scale_factor"], spatial), a["mode"], bool(a["align_corners"])))
        kept.meta = dict(node.meta)
        node.replace_all_uses_with(kept)
        gm.graph.erase_node(node)
    gm.recompile()


def _each(value: Any, spatial: int) -> list[Any] | None:
    """One value per spatial axis; a single value is repeated."""
    return None if value is None else list(value) if isinstance(value, (list, tuple)) else [value] * spatial


def _whole_layers(name: str) -> tuple[Any, Any]:
    """(the ATen operation of a kind of recurrent layers, svod's operator that stands for it)."""
    operation = getattr(torch.ops.aten, name).input
    schema = str(operation._schema)
    kept = torch.library.custom_op(f"svod::{name}", lambda *args: operation(*args), mutates_args=(), schema=schema[schema.index("("):])
    kept.register_fake(_like_layers)
    return operation, getattr(torch.ops.svod, name).default


def _like_layers(x: Any, states: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
                 batch_first: bool) -> Any:
    """Fake results of a recurrent layer."""
    last = states if isinstance(states, (list, tuple)) else [states]
    steps = x.transpose(0, 1) if batch_first else x
    outputs = x.new_empty((*steps.shape[:2], last[0].shape[-1] * (1 + bidirectional)))
    return outputs.transpose(0, 1) if batch_first else outputs, *map(torch.empty_like, last)


RECURRENT = dict(map(_whole_layers, ("lstm", "gru", "rnn_tanh", "rnn_relu")))
_TRACED = DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd


@contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Let PyTorch trace recurrent layers as operators of svod within the context. PyTorch looks decompositions up only while it traces:
    modules that run are not affected."""
    before = {operation: dict(operation.py_kernels) for operation in RECURRENT}
    for operation, kept in RECURRENT.items():
        operation.py_kernels.update(dict.fromkeys(_TRACED, kept))
        operation._dispatch_cache.clear()
    try:
        yield
    finally:
        for operation, kernels in before.items():
            operation.py_kernels.clear()
            operation.py_kernels.update(kernels)
            operation._dispatch_cache.clear()
