"""GroupQueryAttention and QAttention of com.microsoft, against NumPy in float64, batch by batch and head by head."""
from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import helper

import svod.onnx
from svod.errors import UnsupportedError
from tests.draws import a_half
from tests.onnx.test_model import info, model

D = np.float64
# sizes and attributes of each case: N batches, S steps, P rows in a cache of M, H heads in K groups of E elements
CASES: dict[str, dict[str, Any]] = {
    "prompt": {"S": 5}, "batch": {"N": 2, "S": 3}, "no cache": {"S": 3, "M": None}, "a step": {"P": 6}, "steps": {"S": 3, "P": 6},
    "room": {"P": 6, "M": 11}, "room for a prompt": {"S": 4, "M": 11}, "one head": {"S": 3, "H": 1, "K": 1}, "one group": {"S": 3, "K": 1},
    "turned": {"S": 5, "turned": 16}, "turned step": {"P": 5, "turned": 16}, "interleaved": {"S": 2, "P": 5, "turned": 16, "pairs": True},
    "partly turned": {"S": 2, "P": 3, "turned": 16, "E": 32}, "positions": {"P": 4, "turned": 16, "places": [[2]]},
    "packed": {"S": 3, "packed": True}, "packed step": {"P": 7, "packed": True, "turned": 16}, "window": {"S": 6, "window": 3},
    "window of a step": {"P": 9, "window": 3}, "capped": {"S": 4, "cap": 2.0}, "smooth": {"S": 4, "smooth": 1},
    "sink": {"S": 4, "sink": True},
    "bias": {"S": 4, "bias": True}, "bias of a step": {"P": 4, "bias": True, "cap": 1.5}, "scale": {"S": 3, "scale": 0.3},
    "both ways": {"S": 4, "causal": 0}, "normed": {"S": 3, "normed": True, "turned": 16}, "unequal": {"N": 2, "P": 6, "lengths": [6, 3]},
    "unequal prompts": {"N": 2, "S": 5, "lengths": [4, 2]}, "16 bits": {"P": 5, "turned": 16, "kind": np.float16},
    "all": {"N": 2, "P": 9, "window": 4, "cap": 3.0, "smooth": 1, "packed": True, "turned": 16, "lengths": [9, 5]}}


def turned(x: Any, angles: Any, pairs: bool) -> Any:
    """Rotate the first elements of x (heads, S, E) by angles (S, half)."""
    size, out = 2 * angles.shape[1], x.copy()
    at = (slice(0, size, 2), slice(1, size, 2)) if pairs else (slice(0, size // 2), slice(size // 2, size))
    a, b = x[..., at[0]], x[..., at[1]]
    out[..., at[0]], out[..., at[1]] = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return out


def reference(case: dict[str, Any], feeds: dict[str, Any], batch: int) -> tuple[Any, Any, Any]:
    """The output, and the valid rows of both caches, of one batch."""
    heads, groups, width, steps = case["H"], case["K"], case["E"], case["S"]
    q, k, v = (feeds[n][batch].astype(D).reshape(steps, n_heads, width).transpose(1, 0, 2)
               for n, n_heads in (("q", heads), ("k", groups), ("v", groups)))
    end = int(feeds["lengths"][batch]) + 1
    begin = max(end - steps, 0) if case["P"] else 0
    if case["normed"]:
        q, k = (t / np.sqrt((t ** 2).mean(-1, keepdims=True) + 1e-6) * feeds[n].astype(D) for t, n in ((q, "qn"), (k, "kn")))
    if case["turned"]:
        places = np.arange(begin, begin + steps) if case["places"] is None else np.array(case["places"][batch])
        q, k = (turned(t, case["angles"][places], case["pairs"]) for t in (q, k))
    keys, values = (np.concatenate([feeds[n][batch].astype(D)[:, :begin], t], 1) if case["P"] else t for n, t in (("pk", k), ("pv", v)))
    out = np.zeros((steps, heads, width))
    for h in range(heads):
        for s in range(steps):
            last = begin + s if case["causal"] else end - 1
            first = max(0, last - case["window"] + 1) if case["window"] > 0 else 0
            at = slice(first, last + 1)
            scores = keys[h // (heads // groups), at] @ q[h, s] * (case["scale"] or width ** -0.5)
            scores = case["cap"] * np.tanh(scores / case["cap"]) if case["cap"] else scores
            scores = scores + (feeds["bias"][0, h, s, at] if case["bias"] else 0)
            shares = np.exp(scores)
            rest = np.exp(feeds["sink"][h].astype(D)) if case["sink"] else 1.0 if case["smooth"] else 0.0
            out[s, h] = shares @ values[h // (heads // groups), at] / (shares.sum() + rest)
    return out.reshape(steps, -1), keys, values


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_groups_of_heads_share_keys_and_values(name: str) -> None:
    plain = {"N": 1, "S": 1, "P": 0, "H": 4, "K": 2, "E": 16, "turned": 0, "pairs": False, "places": None, "packed": False, "window": -1,
             "cap": 0.0, "smooth": 0, "sink": False, "bias": False, "scale": 0.0, "causal": 1, "normed": False, "kind": np.float32}
    case: dict[str, Any] = {**plain, **CASES[name]}
    rng, kind = np.random.default_rng(len(name)), case["kind"]
    n, steps, heads, groups, width = (case[key] for key in ("N", "S", "H", "K", "E"))
    total, room = case["P"] + steps, case.get("M", case["P"])

    def numbers(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(kind)
    case["angles"] = np.arange(32)[:, None] / 50.0 ** np.linspace(0, 1, case["turned"] // 2)
    every = {"q": numbers(n, steps, heads * width), "k": numbers(n, steps, groups * width), "v": numbers(n, steps, groups * width),
             "pk": numbers(n, groups, room or 0, width), "pv": numbers(n, groups, room or 0, width),
             "lengths": np.array(case.get("lengths", [total - 1] * n), np.int32), "total": np.array([total], np.int32),
             "cos": np.cos(case["angles"]).astype(kind), "sin": np.sin(case["angles"]).astype(kind),
             "at": np.array(case["places"] or [[0]], np.int64), "bias": numbers(1, heads, steps, total), "sink": numbers(heads),
             "qn": numbers(width), "kn": numbers(width)}
    there = {"q": True, "k": not case["packed"], "v": not case["packed"], "pk": room is not None, "pv": room is not None, "lengths": True,
             "total": True, "cos": case["turned"], "sin": case["turned"], "at": case["places"], "bias": case["bias"], "sink": case["sink"],
             "": False, " ": False, "qn": case["normed"], "kn": case["normed"]}
    feeds = {k: v for k, v in every.items() if there[k]}
    if case["packed"]:
        feeds["q"] = np.concatenate([every[k] for k in "qkv"], -1)
    node = helper.make_node("GroupQueryAttention", [k if there[k] else "" for k in there], ["y", "keys", "values"],
                            domain="com.microsoft",
                            num_heads=heads, kv_num_heads=groups, do_rotary=int(bool(case["turned"])),
                            rotary_interleaved=int(case["pairs"]),
                            local_window_size=case["window"], softcap=case["cap"], smooth_softmax=case["smooth"], scale=case["scale"],
                            causal=case["causal"])
    kinds = {k: helper.np_dtype_to_tensor_dtype(v.dtype) for k, v in feeds.items()}
    m = svod.onnx.load(model([node], [info(k, list(v.shape), kinds[k]) for k, v in feeds.items()],
                             [helper.make_empty_tensor_value_info(o) for o in node.output]))
    y, keys, values = m(feeds)
    assert keys.shape == values.shape == (n, groups, max(total, room or 0), width) and y.dtype == keys.dtype == kind
    close: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3} if kind == np.float16 else {"rtol": 1e-4, "atol": 1e-5}
    for b in range(n):
        wanted = reference(case, every, b)
        valid, rows = min(steps, int(every["lengths"][b]) + 1), wanted[1].shape[1]
        np.testing.assert_allclose(y[b, :valid], wanted[0][:valid], **close)
        np.testing.assert_allclose(keys[b, :, :rows], wanted[1], **close)
        np.testing.assert_allclose(values[b, :, :rows], wanted[2], **close)


def test_what_group_query_attention_is_not() -> None:
    inputs = [*(info(n, [1, 1, 16]) for n in "qkv"), info("lengths", [1], 6), info("total", [1], 6)]
    node = helper.make_node("GroupQueryAttention", ["q", "k", "v", "", "", "lengths", "total"], ["y"], domain="com.microsoft", num_heads=1,
                            kv_num_heads=1, sliding_window_cache=1)
    feeds = {**{n: np.ones((1, 1, 16), np.float32) for n in "qkv"}, "lengths": np.zeros(1, np.int32), "total": np.ones(1, np.int32)}
    with pytest.raises(UnsupportedError, match="a cache of a window"):
        svod.onnx.load(model([node], inputs, [info("y", None)]))(feeds)


@pytest.mark.parametrize(("masked", "past", "signed"), a_half(product([False, True], [0, 3], [False, True])))
def test_attention_with_a_quantised_projection(masked: bool, past: int, signed: bool) -> None:
    rng = np.random.default_rng(past)
    n, steps, width, heads = 2, 3, 8, 2
    x, w = rng.integers(0, 256, (n, steps, 5)).astype(np.uint8), rng.integers(-128, 128, (5, 3 * width)).astype(np.int8)
    w = w if signed else w.view(np.uint8)
    scales, zeros = rng.random(3 * width).astype(np.float32) / 500, rng.integers(0, 5, 3 * width).astype(w.dtype)
    feeds: dict[str, Any] = {"x": x, "w": w, "b": rng.standard_normal(3 * width).astype(np.float32), "xs": np.array(0.02, np.float32),
                             "ws": scales, "mask": np.array([past + steps, past + 1], np.int32), "xz": np.array(130, np.uint8), "wz": zeros,
                             "past": rng.standard_normal((2, n, heads, past, width // heads)).astype(np.float32)}
    together = (x.astype(D) - 130) @ (w.astype(D) - zeros) * (0.02 * scales.astype(D)) + feeds["b"]
    q, k, v = (t.reshape(n, steps, heads, -1).transpose(0, 2, 1, 3) for t in np.split(together, 3, -1))
    k, v = (np.concatenate([feeds["past"][i], t], 2) for i, t in enumerate((k, v)))
    scores = q @ k.swapaxes(-2, -1) / (width // heads) ** 0.5
    if masked:
        scores = scores + np.where(np.arange(past + steps) < feeds["mask"][:, None], 0, -10000.0)[:, None, None]
    else:
        del feeds["mask"]
    if not past:
        del feeds["past"]
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (shares / shares.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(n, steps, width)
    names = [k if k in feeds else "" for k in ("x", "w", "b", "xs", "ws", "mask", "xz", "wz", "past")]
    node = helper.make_node("QAttention", names, ["y", "present"], domain="com.microsoft", num_heads=heads)
    inputs = [info(k, list(v.shape), helper.np_dtype_to_tensor_dtype(v.dtype)) for k, v in feeds.items()]
    y, present = svod.onnx.load(model([node], inputs, [info("y", None), info("present", None)]))(feeds)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(present, np.stack([k, v]), rtol=1e-4, atol=1e-5)
