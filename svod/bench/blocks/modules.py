"""The layers of the vocabulary in PyTorch, as a user would write them.

    make_block(block)       a module in evaluation mode, and the arguments of a call; `torch.manual_seed` determines weights and inputs
"""
from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from svod.bench.blocks.block import Block, BlockLayer, Form
from svod.bench.blocks.vocabulary import INTEGER_TYPES, POINTWISE, Shape, Values, axis_of, form_after, parameters_of

Tensor = Any        # stands for torch.Tensor, because mypy also runs without torch
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
Function = Callable[..., Tensor]
EPS = 1e-5
_QUANTUM = 1 / 16     # a step of quantised values: a power of two, so that a division by it is exact


class Applied(nn.Module):  # type: ignore[misc]
    """A function of the input and of tensors that belong to the layer."""

    def __init__(self, name: str, function: Function, *tensors: Tensor) -> None:
        super().__init__()
        self.name, self.function, self.count = name, function, len(tensors)
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"tensor{i}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(x, *(getattr(self, f"tensor{i}") for i in range(self.count)))

    def extra_repr(self) -> str:
        """The name of the layer."""
        return self.name


class Branch(nn.Module):  # type: ignore[misc]
    """Joins its input and the result of the layers of a body."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], body: nn.Module) -> None:
        super().__init__()
        self.join, self.body = join, body

    def forward(self, x: Tensor) -> Tensor:
        """Join the input and the body's result."""
        return self.join(x, self.body(x))


class Recurrent(nn.Module):  # type: ignore[misc]
    """A recurrent layer that returns its outputs only, not its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all steps."""
        return self.layer(x)[0]


class Unrolled(nn.Module):  # type: ignore[misc]
    """A recurrent cell in a Python loop over the steps."""

    def __init__(self, cell: nn.Module, out: int) -> None:
        super().__init__()
        self.cell, self.out = cell, out

    def forward(self, x: Tensor) -> Tensor:
        """The states after each step, from a state of zeros."""
        h = c = x.new_zeros(x.shape[0], self.out)
        states = []
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(step, (h, c))
            else:
                h = self.cell(step, h)
            states.append(h)
        return torch.stack(states, 1)


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention with its projections."""

    def __init__(self, width: int, heads: int, mask: str, length: int) -> None:
        super().__init__()
        self.heads, self.causal = heads, mask == "causal"
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        offsets = torch.arange(length)[:, None] - torch.arange(length)[None]
        masks = {"padding": (torch.arange(length) < max(1, 3 * length // 4)).expand(length, length), "band": offsets.abs() <= 8,
                 "bias": -offsets.abs() / 8}
        self.register_buffer("mask", masks.get(mask))

    def forward(self, x: Tensor) -> Tensor:
        """Project, attend, project."""
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.into(x).chunk(3, -1))
        mask = self.mask.to(x.dtype) if self.mask is not None and self.mask.is_floating_point() else self.mask
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def make_block(block: Block) -> Made:
    """A module that computes a block, and the arguments of a call."""
    module = _chain(block.input, block.layers).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):       # statistics as after a training
            nn.init.normal_(part.running_mean, std=0.5)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
            nn.init.uniform_(part.weight, 0.5, 1.5)
    dtype = getattr(torch, block.input.dtype)
    if block.input.dtype in INTEGER_TYPES:
        return module, (torch.randint(0, 100, block.input.shape, dtype=dtype),), {}
    return module.to(dtype), (torch.randn(block.input.shape).to(dtype),), {}


def in_double(made: Made) -> Made:
    """The same block with its weights and inputs in float64."""
    module, args, kwargs = made
    return deepcopy(module).double(), tuple(a.double() if a.is_floating_point() else a for a in args), kwargs


def _chain(form: Form, layers: tuple[BlockLayer, ...]) -> nn.Module:
    made = []
    for layer in layers:
        made.append(_layer(form, layer))
        form = form_after(form, layer)
    return nn.Sequential(*made)


def _layer(form: Form, layer: BlockLayer) -> nn.Module:
    v = parameters_of(layer)
    if layer.op in ("residual", "gate", "concat"):
        joins: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "residual": lambda x, y: x + y, "gate": lambda x, y: x * y.sigmoid(),
            "concat": lambda x, y: torch.cat([x, y], axis_of(form.shape, v))}
        return Branch(joins[layer.op], _chain(form, layer.body))
    if layer.op in MODULE_LAYERS:
        return MODULE_LAYERS[layer.op](form.shape, v)
    if layer.op in WEIGHTED_LAYERS:
        tensors, weighted = WEIGHTED_LAYERS[layer.op](form.shape, v)
        return Applied(str(layer), weighted, *tensors)
    made = FUNCTION_LAYERS[layer.op]
    return Applied(str(layer), made(form.shape, v))


def _by_rank(names: str) -> Callable[[Shape], Any]:
    """The class of torch.nn whose name ends in the number of spatial axes, such as Conv2d. `names`: the name without the number."""
    return lambda shape: getattr(nn, f"{names}{len(shape) - 2}d")


def _conv(shape: Shape, v: Values) -> nn.Module:
    k, d = int(v["k"]), int(v["d"])
    return _by_rank("Conv")(shape)(shape[1], v["out"], k, stride=v["s"], padding=d * (k // 2), dilation=d, groups=v["g"])


def _conv_row(shape: Shape, v: Values) -> nn.Module:
    flat, k = (1,) * (len(shape) - 3), int(v["k"])
    return _by_rank("Conv")(shape)(shape[1], v["out"], (*flat, k), padding=(*(0 for _ in flat), k // 2))


def _transposed(shape: Shape, v: Values) -> nn.Module:
    k, s = int(v["k"]), int(v["s"])
    return _by_rank("ConvTranspose")(shape)(shape[1], v["out"], k, s, (k - s) // 2)


def _avg_pool(shape: Shape, v: Values) -> nn.Module:
    k = int(v["k"])
    return _by_rank("AvgPool")(shape)(k, v["s"], k // 2 if k % 2 else 0, count_include_pad=bool(v["border"]))


def _max_pool(shape: Shape, v: Values) -> nn.Module:
    k = int(v["k"])
    return _by_rank("MaxPool")(shape)(k, v["s"], k // 2 if k % 2 else 0)


def _resample(shape: Shape, v: Values) -> nn.Module:
    modes = {"nearest": "nearest", "cubic": "bicubic", "linear": ("linear", "bilinear", "trilinear")[len(shape) - 3]}
    mode = modes[str(v["mode"])]
    return nn.Upsample(scale_factor=int(v["percent"]) / 100, mode=mode)


class Squeeze(nn.Module):  # type: ignore[misc]
    """Squeeze and excitation."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Scale channels by a function of their means."""
        weights = self.out(functional.silu(self.into(x.flatten(2).mean(-1)))).sigmoid()
        return x * weights.view(*weights.shape, *(1,) * (x.dim() - 2))


class SwiGlu(nn.Module):  # type: ignore[misc]
    """The gated layer of a transformer."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, out), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        """The product silu(gate) · up of two linear layers."""
        return functional.silu(self.gate(x)) * self.up(x)


class TokenConv(nn.Module):  # type: ignore[misc]
    """A causal convolution of each feature along the tokens, as in Mamba."""

    def __init__(self, width: int, k: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, k, groups=width, padding=k - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with padding on both sides, and drop the positions behind the end of the input."""
        return self.conv(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)


# layers that are modules
MODULE_LAYERS: dict[str, Callable[[Shape, Values], Any]] = {
    "conv": _conv,
    "conv_row": _conv_row,
    "transposed": _transposed,
    "batch_norm": lambda s, v: _by_rank("BatchNorm")(s)(s[1]),
    "group_norm": lambda s, v: nn.GroupNorm(v["g"], s[1]),
    "instance_norm": lambda s, v: _by_rank("InstanceNorm")(s)(s[1]),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_pool": lambda s, v: _by_rank("AdaptiveAvgPool")(s)(v["n"]),
    "resample": _resample,
    "pixel_shuffle": lambda s, v: nn.PixelShuffle(v["f"]),
    "pixel_unshuffle": lambda s, v: nn.PixelUnshuffle(v["f"]),
    "reflect_pad": lambda s, v: _by_rank("ReflectionPad")(s)(v["n"]),
    "se": lambda s, v: Squeeze(s[1], max(4, s[1] // int(v["r"]))),
    "linear": lambda s, v: nn.Linear(s[-1], v["out"]),
    "swiglu": lambda s, v: SwiGlu(s[-1], int(v["out"])),
    "token_conv": lambda s, v: TokenConv(s[-1], int(v["k"])),
    "attention": lambda s, v: Attention(s[-1], int(v["h"]), str(v["mask"]), s[1]),
    "lstm": lambda s, v: Recurrent(nn.LSTM(s[-1], v["out"], v["layers"], batch_first=True, bidirectional=bool(v["both"]))),
    "gru": lambda s, v: Recurrent(nn.GRU(s[-1], v["out"], v["layers"], batch_first=True, bidirectional=bool(v["both"]))),
    "rnn": lambda s, v: Recurrent(nn.RNN(s[-1], v["out"], v["layers"], batch_first=True, bidirectional=bool(v["both"]))),
    "lstm_cell": lambda s, v: Unrolled(nn.LSTMCell(s[-1], v["out"]), int(v["out"])),
    "gru_cell": lambda s, v: Unrolled(nn.GRUCell(s[-1], v["out"]), int(v["out"])),
    "embedding": lambda s, v: nn.Sequential(Applied("modulo", lambda x: x.remainder(int(v["v"]))), nn.Embedding(v["v"], v["out"])),
}


def _vector(shape: Shape, v: Values) -> Tensor:
    """Random numbers around 1 along the axis of a layer, in a shape that broadcasts."""
    axis = axis_of(shape, v)
    return (torch.rand(shape[axis]) + 0.5).view(*(shape[axis] if i == axis else 1 for i in range(len(shape))))


def _layer_norm(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis = axis_of(shape, v)

    def run(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
        return functional.layer_norm(x.movedim(axis, -1), gain.shape, gain, offset, EPS).movedim(-1, axis)
    return (torch.rand(shape[axis]) + 0.5, torch.randn(shape[axis])), run


def _rms_norm(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis = axis_of(shape, v)
    return (_vector(shape, v),), lambda x, gain: x * (x * x).mean(axis, keepdim=True).add(EPS).rsqrt() * gain


def _positions(shape: Shape, v: Values) -> tuple[int, int, Tensor]:
    """The axis, the count of positions, and that many random positions along the axis."""
    axis, n = axis_of(shape, v), int(v["n"])
    return axis, n, torch.randint(0, shape[axis], (n,))


def _gather(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis, n = axis_of(shape, v), int(v["n"])
    index = torch.randint(0, shape[axis], (*shape[:axis], n, *shape[axis + 1:]))
    return (index,), lambda x, i: x.gather(axis, i)


def _select(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis, _, index = _positions(shape, v)
    return (index,), lambda x, i: x.index_select(axis, i)


def _scatter_add(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis, n = axis_of(shape, v), int(v["n"])
    out = (*shape[:axis], n, *shape[axis + 1:])
    return (torch.randint(0, n, shape),), lambda x, i: x.new_zeros(out).scatter_add(axis, i, x)


def _index_add(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis, n = axis_of(shape, v), int(v["n"])
    out = (*shape[:axis], n, *shape[axis + 1:])
    return (torch.randint(0, n, (shape[axis],)),), lambda x, i: x.new_zeros(out).index_add(axis, i, x)


def _put_rows(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    rows = torch.randperm(shape[0])[:int(v["n"])]

    def run(x: Tensor, i: Tensor) -> Tensor:
        y = x.clone()
        y[i] = x[:i.shape[0]] + 1
        return y
    return (rows,), run


def _einsum(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    first, second, result = str(v["e"]).split(".")
    sizes = dict(zip(first, shape, strict=True))
    weight = torch.randn([sizes.get(letter) or int(v["out"]) for letter in second]) / shape[-1] ** 0.5
    return (weight,), lambda x, w: torch.einsum(f"{first},{second}->{result}", x, w)


def _int8_linear(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    weight = torch.randint(-127, 128, (int(v["out"]), shape[-1]), dtype=torch.int8)
    scale = torch.rand(int(v["out"]), 1) / (127 * shape[-1] ** 0.5)
    return (weight, scale), lambda x, w, s: functional.linear(x, w.to(x.dtype) * s)


def _int4_linear(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    packed = torch.randint(0, 256, (int(v["out"]), shape[-1] // 2), dtype=torch.uint8)
    scale = torch.rand(int(v["out"]), 1) / (8 * shape[-1] ** 0.5)

    def run(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        numbers = torch.stack([w & 15, w >> 4], -1).flatten(1)
        return functional.linear(x, (numbers.to(x.dtype) - 8) * s)
    return (packed, scale), run


def _int8_product(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    weight = torch.randint(-127, 128, (shape[-1], int(v["out"])), dtype=torch.int8)

    def run(x: Tensor, w: Tensor) -> Tensor:
        product = (x / _QUANTUM).round().clamp(-127, 127).to(torch.int8).to(torch.int32) @ w.to(torch.int32)
        return product.to(x.dtype) * (_QUANTUM / (127 * x.shape[-1] ** 0.5))
    return (weight,), run


def _quantised_channels(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    def run(x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).round().clamp(-127, 127).to(torch.int8).to(x.dtype) * scale
    return ((2.0 ** torch.randint(-6, -3, _vector(shape, v).shape)),), run


def _sort_others(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    axis = axis_of(shape, v)
    return (torch.randn(shape),), lambda x, y: y.to(x.dtype).gather(axis, torch.sort(x, dim=axis, stable=True)[1])


def _nearest(shape: Shape, v: Values) -> tuple[tuple[Tensor, ...], Function]:
    def run(x: Tensor, centres: Tensor) -> Tensor:
        return centres[((x[:, None] - centres[None]) ** 2).sum(-1).argmin(1)]
    return (torch.randn(int(v["n"]), shape[-1]),), run


# layers with tensors of their own, each a function that returns (these tensors, a function of the input and of them)
WEIGHTED_LAYERS: dict[str, Callable[[Shape, Values], tuple[tuple[Tensor, ...], Function]]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "scale": lambda s, v: ((_vector(s, v),), lambda x, w: x * w),
    "offset": lambda s, v: ((_vector(s, v),), lambda x, w: x + w),
    "gather": _gather,
    "select": _select,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "put_rows": _put_rows,
    "sort_others": _sort_others,
    "masked_fill": lambda s, v: ((torch.rand(s[-1:]) < 0.3,), lambda x, m: x.masked_fill(m, 1)),
    "bucketize": lambda s, v: ((torch.linspace(-2, 2, int(v["n"])),), lambda x, b: torch.bucketize(x.to(b.dtype), b)),
    "einsum": _einsum,
    "quantised_channels": _quantised_channels,
    "int8_linear": _int8_linear,
    "int4_linear": _int4_linear,
    "int8_product": _int8_product,
    "window_product": lambda s, v: ((torch.randn(int(v["n"])),), lambda x, w: x.unfold(axis_of(s, v), w.shape[0], 1) @ w),
    "nearest": _nearest,
    "n_body": lambda s, v: ((torch.rand(s[0]),), _n_body),
}


def _n_body(x: Tensor, mass: Tensor) -> Tensor:
    apart = x[None] - x[:, None]
    square = (apart * apart).sum(-1) + 0.01
    return (apart * (mass * square.rsqrt() / square)[..., None]).sum(1) / x.shape[0]


def _axis(function: Callable[[Tensor, int], Tensor]) -> Callable[[Shape, Values], Function]:
    """A layer that applies a function along its axis."""
    def make(shape: Shape, v: Values) -> Function:
        axis = axis_of(shape, v)
        return lambda x: function(x, axis)
    return make


def _axis_count(function: Callable[[Tensor, int, int], Tensor]) -> Callable[[Shape, Values], Function]:
    """A layer that applies a function of the input, the layer's axis and its number n."""
    def make(shape: Shape, v: Values) -> Function:
        axis, n = axis_of(shape, v), int(v["n"])
        return lambda x: function(x, axis, n)
    return make


def _plain(function: Function) -> Callable[[Shape, Values], Function]:
    return lambda shape, v: function


def _times(step: Function) -> Callable[[Shape, Values], Function]:
    """A layer that applies a step n times, where n is the layer's parameter."""
    def make(shape: Shape, v: Values) -> Function:
        def run(x: Tensor) -> Tensor:
            for _ in range(int(v["n"])):
                x = step(x)
            return x
        return run
    return make


def _channel_shuffle(shape: Shape, v: Values) -> Function:
    return lambda x: x.unflatten(1, (int(v["g"]), -1)).transpose(1, 2).flatten(1, 2)


def _rotary(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * 0.01 ** (torch.arange(half, device=x.device) / half)
    a, b = x.chunk(2, -1)
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


def _moving_state(x: Tensor) -> Tensor:
    state, states = x[:, 0], []
    for step in x.unbind(1):
        state = 0.9 * state + 0.1 * step
        states.append(state)
    return torch.stack(states, 1)


def _shift(x: Tensor, axis: int, n: int) -> Tensor:
    """Half of the input plus half of the input n positions before, which is 0 before the first position."""
    n = min(n, x.shape[axis])
    before = torch.cat([torch.zeros_like(x.narrow(axis, 0, n)), x.narrow(axis, 0, x.shape[axis] - n)], axis)
    return (x + before) // 2 if x.dtype in (torch.int32, torch.int64) else 0.5 * x + 0.5 * before


def _quantised(shape: Shape, v: Values) -> Function:
    most = 2 ** (int(v["bits"]) - 1) - 1
    step = _QUANTUM * 128 / (most + 1)
    return lambda x: (x / step).round().clamp(-most, most).to(torch.int8).to(x.dtype) * step


def _stencil5(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:-1, 1:-1] = (x[1:-1, 1:-1] * 4 + x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])
    return y if x.dtype in (torch.int32, torch.int64) else y / 8


def _stencil9(x: Tensor) -> Tensor:
    around = functional.pad(x[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    rows, columns = x.shape
    return sum(around[i:i + rows, j:j + columns] * w for i in range(3) for j in range(3) if (w := (1 + (i == 1)) * (1 + (j == 1)) / 16))


def _edges(x: Tensor) -> Tensor:
    dx, dy = x.roll(-1, 1) - x.roll(1, 1), x.roll(-1, 0) - x.roll(1, 0)
    return (dx * dx + dy * dy + 1e-3).sqrt()


def _life(x: Tensor) -> Tensor:
    alive = (x % 2).to(torch.int32)
    around = sum(alive.roll((i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
    return ((around == 3) | ((alive == 1) & (around == 2))).to(x.dtype)


def _distances(x: Tensor) -> Tensor:
    return ((x[:, None] - x[None]) ** 2).sum(-1).add(1e-3).sqrt()


def _polynomial(shape: Shape, v: Values) -> Function:
    def run(x: Tensor) -> Tensor:
        x, y = x.tanh(), 0.0
        for i in range(int(v["n"])):
            y = y * x + 1 / (1 + i)
        return y
    return run


def _black_scholes(x: Tensor) -> Tensor:
    spot, strike, time, rate, spread = x.abs() + 0.5, 1.0, 0.5, 0.02, 0.3
    a = ((spot / strike).log() + (rate + spread * spread / 2) * time) / (spread * time ** 0.5)
    b = a - spread * time ** 0.5
    return spot * torch.special.ndtr(a) - strike * math.exp(-rate * time) * torch.special.ndtr(b)


def _self_einsum(shape: Shape, v: Values) -> Function:
    first, second, result = str(v["e"]).split(".")
    return lambda x: torch.einsum(f"{first},{second}->{result}", x, x) / shape[-1] ** 0.5


# layers that are functions of the input alone
FUNCTION_LAYERS: dict[str, Callable[[Shape, Values], Function]] = {
    **{name: _plain(getattr(functional, name)) for name in POINTWISE},
    "channel_shuffle": _channel_shuffle,
    "space_softmax": _plain(lambda x: x.flatten(2).softmax(-1).view_as(x)),
    "softmax": _axis(lambda x, axis: x.softmax(axis)),
    "log_softmax": _axis(lambda x, axis: x.log_softmax(axis)),
    "standardise": _axis(lambda x, axis: (x - x.mean(axis, keepdim=True)) / (x.var(axis, keepdim=True, unbiased=False) + 1e-3).sqrt()),
    "unit_length": _axis(lambda x, axis: functional.normalize(x, dim=axis, eps=1e-3)),
    "center": _axis(lambda x, axis: x - x.mean(axis, keepdim=True)),
    "cumsum": _axis(lambda x, axis: x.cumsum(axis, dtype=x.dtype)),
    "cummax": _axis(lambda x, axis: x.cummax(axis)[0]),
    "logcumsumexp": _axis(lambda x, axis: x.logcumsumexp(axis)),
    "flip": _axis(lambda x, axis: x.flip(axis)),
    "roll": _axis_count(lambda x, axis, n: x.roll(n, axis)),
    "shift": _axis_count(_shift),
    "glu": _axis(lambda x, axis: functional.glu(x, axis)),
    "repeat": _axis_count(lambda x, axis, n: x.repeat_interleave(n, axis)),
    "diff": _axis(lambda x, axis: x.diff(dim=axis)),
    "sum": _axis(lambda x, axis: x.sum(axis)),
    "max": _axis(lambda x, axis: x.amax(axis)),
    "variance": _axis(lambda x, axis: x.var(axis, unbiased=False)),
    "logsumexp": _axis(lambda x, axis: x.logsumexp(axis)),
    "transpose": _plain(lambda x: x.transpose(-1, -2).contiguous()),
    "rotary": _plain(_rotary),
    "interleave": _plain(lambda x: torch.cat([x[..., ::2] * x[..., 1::2].sigmoid(), x[..., 1::2]], -1)),
    "moving_state": _plain(_moving_state),
    "one_hot": lambda s, v: lambda x: functional.one_hot(x.remainder(int(v["n"])).long(), int(v["n"])).to(x.dtype),
    "sort": _axis(lambda x, axis: x.sort(axis)[0]),
    "topk": _axis_count(lambda x, axis, n: x.topk(n, axis)[0]),
    "tril": _plain(torch.tril),
    "einsum_self": _self_einsum,
    "quantised": _quantised,
    "stencil5": _times(_stencil5),
    "stencil9": _times(_stencil9),
    "edges": _plain(_edges),
    "life": _times(_life),
    "moving_mean": _axis_count(lambda x, axis, n: x.unfold(axis, n, 1).mean(-1)),
    "moving_max": _axis_count(lambda x, axis, n: x.unfold(axis, n, 1).amax(-1)),
    "distances": _plain(_distances),
    "gram": lambda s, v: lambda x: x @ x.T / s[-1] ** 0.5,
    "histogram": lambda s, v: lambda x: torch.histc(x, int(v["n"]), -4, 4),
    "bin_counts": lambda s, v: lambda x: _bin_counts(x.flatten(), int(v["n"])),
    "polynomial": _polynomial,
    "logistic": lambda s, v: _logistic(int(v["n"])),
    "black_scholes": _plain(_black_scholes),
}


def _bin_counts(x: Tensor, n: int) -> Tensor:
    return x.new_zeros(n).index_add(0, x.remainder(n), torch.ones_like(x))


def _logistic(n: int) -> Function:
    def run(x: Tensor) -> Tensor:
        x = x.sigmoid()
        for _ in range(n):
            x = 2.9 * x * (1 - x)
        return x
    return run
