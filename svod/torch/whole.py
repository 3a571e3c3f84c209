"""Keeps operations as a whole that PyTorch would decompose regardless of the given decompositions, although svod implements them.

    F.interpolate(x, size, None, "bilinear", False)   →   svod::interpolate(x, size, None, "bilinear", False)     in Dynamo's graph

AOT autograd does not decompose the operator of svod. PyTorch's decomposition of a resized image gathers four neighbours per pixel; svod
resizes one axis after the other.
"""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
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
