"""The layers that blocks are made of: the parameters that each may have, and the form of its result. No library is imported.

    KINDS["conv"].draw(source, form)          parameters for an input of that form
    form_after(form, BlockLayer("conv", …))        the form of its result; raises MisfitError where the layer does not fit the form

`modules.py` has the same layers in PyTorch.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from svod.bench.blocks.block import Block, BlockLayer, Form, Value, parsed_value
from svod.bench.suites.random_kernels import Draw
from svod.errors import SvodError

Values = Mapping[str, Value]
Shape = tuple[int, ...]
POINTWISE = ("relu", "gelu", "silu", "mish", "hardswish", "elu", "sigmoid", "leaky_relu", "softplus", "tanh")
BRANCHES = ("residual", "concat", "gate")       # layers with a body
INTEGER_TYPES = ("int32", "int64")
# layers that PyTorch lacks in bfloat16; and `nearest`, which compares sums that bfloat16 rounds
NO_BFLOAT16 = ("avg_pool", "histogram", "nearest")
MOST_WRITTEN_STEPS = 24              # most steps of a loop that is written out in Python
MOST_WRITTEN_OUT = 20_000_000   # most numbers in an array of differences between all pairs of rows
EINSUMS = ("abc.cd.abd", "abc.dc.abd", "abc.bcd.abd", "abc.acd.abd", "abc.cb.abc", "abc.cd.adb", "abc.bd.adc", "abc.c.abc", "abc.cde.abd")
SELF_EINSUMS = ("abc.adc.abd", "abc.abd.acd", "abc.adc.adb", "abc.ade.abe")
STEPPED = ("quantised", "quantised_channels", "int8_product", "histogram")     # a rounding may change their results by a step
OPENING = ("bucketize", "nearest", "sort_others")       # discontinuous layers, which only take a block's input
MASKS = ("none", "causal", "padding", "band", "bias")
WORD_PARAMETERS = ("mode", "mask", "e")       # parameters that are words; others are integers
MOST_AXES = 5
LEAST_VALUES = {"axis": -MOST_AXES, "both": 0, "border": 0}        # the least values of parameters; of others 1


class MisfitError(SvodError):
    """A layer does not fit the form of its input."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer. `rule`: a function that returns the shape of the result. `takes`: its parameters, as "out k s=1"; those with a value
    may be left out. `ranks`: the ranks of the input. `integers`: whether it takes integers, or nothing else ("only"). `result`: the dtype
    of the result; "": the input's dtype."""

    rule: Callable[[Shape, Values], Shape]
    takes: str = ""
    draw: Callable[[Draw, Shape], Values] = lambda d, s: {}
    ranks: range = range(1, MOST_AXES + 1)
    integers: bool | str = False
    result: str = ""

    @cached_property
    def defaults(self) -> Mapping[str, Value | None]:
        """The parameters by name; those without a default are None."""
        parts = (word.partition("=") for word in self.takes.split())
        return {name: parsed_value(value) if equals else None for name, equals, value in parts}


def fit(condition: bool, why: str) -> None:
    """Raise MisfitError unless the condition holds."""
    if not condition:
        raise MisfitError(why)


def parameters_of(layer: BlockLayer) -> Values:
    """The parameters of a layer, with those that are left out. Raises MisfitError for a layer or a parameter that is not there, one that is
    missing, and a value that is none for it."""
    kind = KINDS.get(layer.op)
    if kind is None:
        raise MisfitError(f"there is no layer {layer.op!r}; the layers are {', '.join(KINDS)}")
    parameters, has = {**kind.defaults}, f"{layer.op} has {', '.join(kind.takes.split()) or 'no parameters'}"
    for name, value in layer.values:
        fit(name in parameters, f"{layer.op} has no parameter {name}; {has}")
        least = LEAST_VALUES.get(name, 1)
        fit(name in WORD_PARAMETERS or (isinstance(value, int) and value >= least), f"{name}={value} is no integer from {least} on")
        parameters[name] = value
    missing = [name for name, value in parameters.items() if value is None]
    fit(not missing, f"{layer.op} needs {', '.join(missing)}; {has}")
    fit(len(layer.given) == len(layer.values), f"{layer.op} gives a parameter twice")
    return {name: value for name, value in parameters.items() if value is not None}


def number(values: Values, name: str) -> int:
    """The value of an integer parameter of a layer."""
    return int(values[name])


def axis_of(shape: Shape, values: Values) -> int:
    """The axis that a layer works along, counted from 0."""
    axis = number(values, "axis")
    fit(-len(shape) <= axis < len(shape), f"there is no axis {axis}")
    return axis % len(shape)


def resized(shape: Shape, axis: int, extent: int) -> Shape:
    """The shape with `extent` along one of its axes."""
    return (*shape[:axis], extent, *shape[axis + 1:])


def form_after(form: Form, layer: BlockLayer) -> Form:
    """The form of a layer's result. Raises MisfitError."""
    values = parameters_of(layer)
    kind = KINDS[layer.op]
    fit(len(form.shape) in kind.ranks, f"{layer.op} does not take {form}")
    takes = kind.integers in (True, "only") if form.dtype in INTEGER_TYPES else kind.integers != "only"
    fit(takes, f"{layer.op} does not take {form.dtype}")
    fit(form.dtype != "bfloat16" or layer.op not in NO_BFLOAT16, f"{layer.op} does not take {form.dtype}")
    fit(bool(layer.body) == (layer.op in BRANCHES), f"{layer.op} has {'no' if layer.body else 'a'} body")
    if layer.body:
        inner = forms_of(form, layer.body)[-1]
        fit(inner.dtype == form.dtype, f"the body of {layer.op} returns {inner.dtype}")
        if layer.op == "concat":
            axis = axis_of(form.shape, values)
            fit(len(inner.shape) == len(form.shape) and resized(inner.shape, axis, 1) == resized(form.shape, axis, 1),
                f"{layer.op} cannot join {form} and {inner}")
            return form._replace(shape=resized(form.shape, axis, form.shape[axis] + inner.shape[axis]))
        fit(inner == form, f"the body of {layer.op} returns {inner} for {form}")
    shape = kind.rule(form.shape, values)
    fit(all(n >= 1 for n in shape), f"{layer.op} leaves nothing of {form}")
    return Form(shape, kind.result or form.dtype)


def forms_of(form: Form, layers: tuple[BlockLayer, ...]) -> list[Form]:
    """The forms before the first and after each layer. Raises MisfitError."""
    forms = [form]
    for layer in layers:
        forms.append(form_after(forms[-1], layer))
    return forms


def check_block(block: Block) -> None:
    """Raise MisfitError unless each layer fits the result of the layer before it."""
    fit(len(block.layers) > 0, "a block has at least one layer")
    fit(all(n >= 1 for n in block.input.shape), f"an input of {block.input} has no numbers; each of its sizes is 1 or more")
    forms_of(block.input, block.layers)


# -- rules ------------------------------------------------------------------------------------------------

def _same(shape: Shape, values: Values) -> Shape:
    return shape


def _along(shape: Shape, values: Values) -> Shape:
    axis_of(shape, values)
    return shape


def _conv(shape: Shape, values: Values) -> Shape:
    batch, channels, *space = shape
    out, k, s, g = (number(values, name) for name in ("out", "k", "s", "g"))
    fit(k % 2 == 1, "a padded convolution has an odd kernel")
    fit(channels % g == 0 and out % g == 0, f"{channels} channels and {out} outputs have no {g} groups")
    return (batch, out, *((n - 1) // s + 1 for n in space))


def _transposed(shape: Shape, values: Values) -> Shape:
    k, s = number(values, "k"), number(values, "s")
    fit(k >= s, "the kernel of a transposed convolution covers its stride")
    return (shape[0], number(values, "out"), *((n - 1) * s - 2 * ((k - s) // 2) + k for n in shape[2:]))


def _pool(shape: Shape, values: Values) -> Shape:
    k, s = number(values, "k"), number(values, "s")
    fit(k <= min(shape[2:]), f"a window of {k} is larger than the input")
    return (*shape[:2], *((n + 2 * (k // 2 if k % 2 else 0) - k) // s + 1 for n in shape[2:]))


def _adaptive(shape: Shape, values: Values) -> Shape:
    n = number(values, "n")
    fit(n <= min(shape[2:]), f"{n} positions are more than there are")
    return (*shape[:2], *(n for _ in shape[2:]))


def _resample(shape: Shape, values: Values) -> Shape:
    fit(values["mode"] in ("nearest", "linear", *(["cubic"] if len(shape) == 4 else [])), "there is no such mode")
    return (*shape[:2], *(n * number(values, "percent") // 100 for n in shape[2:]))


def _grouped(shape: Shape, values: Values) -> Shape:
    fit(shape[1] % number(values, "g") == 0, f"{shape[1]} channels have no such groups")
    return shape


def _instance(shape: Shape, values: Values) -> Shape:
    fit(math.prod(shape[2:]) > 1, "one pixel has no variance")
    return shape


def _pixel_shuffle(shape: Shape, values: Values) -> Shape:
    f = number(values, "f")
    fit(shape[1] % (f * f) == 0, f"{shape[1]} channels have no squares of {f}")
    return (shape[0], shape[1] // (f * f), shape[2] * f, shape[3] * f)


def _pixel_unshuffle(shape: Shape, values: Values) -> Shape:
    f = number(values, "f")
    fit(shape[2] % f == 0 and shape[3] % f == 0, f"an image has no squares of {f}")
    return (shape[0], shape[1] * f * f, shape[2] // f, shape[3] // f)


def _reflected(shape: Shape, values: Values) -> Shape:
    n = number(values, "n")
    fit(n < min(shape[2:]), f"{n} positions are more than there are")
    return (*shape[:2], *(x + 2 * n for x in shape[2:]))


def _halved(shape: Shape, values: Values) -> Shape:
    axis = axis_of(shape, values)
    fit(shape[axis] % 2 == 0, "an odd extent has no halves")
    return resized(shape, axis, shape[axis] // 2)


def _last(shape: Shape, values: Values) -> Shape:
    return (*shape[:-1], number(values, "out"))


def _attention(shape: Shape, values: Values) -> Shape:
    fit(shape[-1] % number(values, "h") == 0 and values["mask"] in MASKS, "no such heads or mask")
    return shape


def _even(shape: Shape, values: Values) -> Shape:
    fit(shape[-1] % 2 == 0, "features in pairs")
    return shape


def _recurrent(shape: Shape, values: Values) -> Shape:
    return (*shape[:-1], number(values, "out") * (2 if number(values, "both") else 1))


def _unrolled(shape: Shape, values: Values) -> Shape:
    fit(shape[1] <= MOST_WRITTEN_STEPS, f"at most {MOST_WRITTEN_STEPS} steps are written out")
    return _last(shape, values) if "out" in values else shape


def _picked(shape: Shape, values: Values) -> Shape:
    return resized(shape, axis_of(shape, values), number(values, "n"))


def _largest(shape: Shape, values: Values) -> Shape:
    fit(number(values, "n") <= shape[axis_of(shape, values)], "more than there are")
    return _picked(shape, values)


def _repeated(shape: Shape, values: Values) -> Shape:
    axis = axis_of(shape, values)
    return resized(shape, axis, shape[axis] * number(values, "n"))


def _windowed(shape: Shape, values: Values) -> Shape:
    axis = axis_of(shape, values)
    return resized(shape, axis, shape[axis] - number(values, "n") + 1)


def _dropped(shape: Shape, values: Values) -> Shape:
    axis = axis_of(shape, values)
    fit(len(shape) > 1, "the result has an axis")
    return (*shape[:axis], *shape[axis + 1:])


def _added(shape: Shape, values: Values) -> Shape:
    return (*shape, number(values, "out" if "out" in values else "n"))


def _einsum(equations: Sequence[str], shape: Shape, values: Values) -> Shape:
    equation = str(values["e"])
    fit(equation in equations, f"there is no einsum {equation!r} of this kind; there are {', '.join(equations)}")
    first, second, result = equation.split(".")
    sizes = dict(zip(first, shape, strict=True))
    if equation in SELF_EINSUMS:
        for letter, n in zip(second, shape, strict=True):
            fit(sizes.setdefault(letter, n) == n, f"{equation} of {shape}")
    return tuple(sizes.get(letter) or number(values, "out") for letter in result)


def _turned(shape: Shape, values: Values) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _pairs(shape: Shape, values: Values) -> Shape:
    """The shape of a result with one number for each pair of rows."""
    _written_out(shape[0], shape)
    return (*shape[:-1], shape[-2])


def _points(shape: Shape, values: Values) -> Shape:
    fit(shape[1] <= 16, "points have at most 16 coordinates")
    return _written_out(shape[0], shape)


def _nearest(shape: Shape, values: Values) -> Shape:
    return _written_out(number(values, "n"), shape)


def _written_out(count: int, shape: Shape) -> Shape:
    fit(count * math.prod(shape) <= MOST_WRITTEN_OUT, "differences of all pairs are too many")
    return shape


def _stencil(shape: Shape, values: Values) -> Shape:
    fit(min(shape[-2:]) >= 3, "a stencil of 3 does not fit")
    return shape


# -- parameters -------------------------------------------------------------------------------------------

def _draw_axis(d: Draw, shape: Shape) -> Values:
    return {"axis": d.choice(*range(1, len(shape)), *range(len(shape)))}


def _draw_conv(d: Draw, shape: Shape) -> Values:
    channels, rank = shape[1], len(shape) - 2
    k = d.choice(*{1: (1, 3, 5, 9, 15), 2: (1, 3, 3, 3, 5, 7), 3: (1, 3, 3)}[rank])
    g = d.choice(1, 1, 1, 1, 2, 4, channels)
    out = channels if g > 1 else d.choice(channels, channels, 2 * channels, *((8, 16, 24) if rank == 3 else (32, 48, 64, 96)))
    others = {"s": d.choice(1, 1, 1, 2), "d": d.choice(1, 1, 1, 2) if k > 1 else 1, "g": g}
    return {"out": out, "k": k, **{name: n for name, n in others.items() if n > 1}}


def _draw_transposed(d: Draw, shape: Shape) -> Values:
    k, s = d.choice((2, 2), (4, 2), (3, 2), (3, 1), (4, 4), (5, 2))
    return {"out": d.choice(shape[1], shape[1] // 2 or 1, 16), "k": k, "s": s}


def _draw_linear(d: Draw, shape: Shape) -> Values:
    return {"out": d.choice(shape[-1], 4 * shape[-1], 64, 200, 256)}


def _draw_recurrent(d: Draw, shape: Shape) -> Values:
    return {"out": d.choice(shape[-1], 64, 100, 128), "layers": d.choice(1, 1, 2), "both": d.choice(0, 0, 1)}


def _draw_count(low: int, high: int) -> Callable[[Draw, Shape], Values]:
    return lambda d, shape: {**_draw_axis(d, shape), "n": d.extent(low, high)}


def _draw_part(d: Draw, shape: Shape) -> Values:
    """Draw an axis, and a number of positions along it."""
    axis = d.choice(*range(len(shape)))
    return {"axis": axis, "n": min(shape[axis], d.extent(1, max(16, shape[axis])))}


def _one_of(**choices: tuple[Value, ...]) -> Callable[[Draw, Shape], Values]:
    return lambda d, shape: {name: d.choice(*values) for name, values in choices.items()}


SPATIAL_RANKS = range(3, 6)
TOKEN_RANK = range(3, 4)
MATRIX_RANK = range(2, 3)

KINDS: dict[str, Kind] = {
    **{name: Kind(_same) for name in POINTWISE},
    "residual": Kind(_same, integers=True),
    "gate": Kind(_same),
    "concat": Kind(_along, "axis=-1", lambda d, s: {"axis": 1 if len(s) > 3 else -1}, integers=True),
    # convolutions, and layers that are used with them, over 1 to 3 spatial axes
    "conv": Kind(_conv, "out k s=1 d=1 g=1", _draw_conv, SPATIAL_RANKS),
    "conv_row": Kind(lambda s, v: _conv(s, {**v, "s": 1, "g": 1}), "out k",
                     lambda d, s: {"out": s[1], "k": d.choice(3, 7, 11)}, SPATIAL_RANKS),
    "transposed": Kind(_transposed, "out k s=1", _draw_transposed, SPATIAL_RANKS),
    "batch_norm": Kind(_same, ranks=SPATIAL_RANKS),
    "group_norm": Kind(_grouped, "g", _one_of(g=(1, 2, 4)), SPATIAL_RANKS),
    "instance_norm": Kind(_instance, ranks=SPATIAL_RANKS),
    "max_pool": Kind(_pool, "k s=1", lambda d, s: dict(zip("ks", d.choice((2, 2), (3, 1), (3, 2), (5, 1)), strict=True)), SPATIAL_RANKS),
    "avg_pool": Kind(_pool, "k s=1 border=1", lambda d, s: {
        **dict(zip("ks", d.choice((2, 2), (3, 1), (3, 2), (7, 1)), strict=True)), "border": d.choice(0, 1)}, SPATIAL_RANKS),
    "adaptive_pool": Kind(_adaptive, "n", _one_of(n=(1, 4, 7, 12)), SPATIAL_RANKS),
    "resample": Kind(_resample, "percent=200 mode=nearest",
                     _one_of(percent=(200, 200, 150, 50), mode=("nearest", "linear", "linear", "cubic")), SPATIAL_RANKS),
    "pixel_shuffle": Kind(_pixel_shuffle, "f=2", _one_of(f=(2, 4)), range(4, 5)),
    "pixel_unshuffle": Kind(_pixel_unshuffle, "f=2", _one_of(f=(2,)), range(4, 5)),
    "channel_shuffle": Kind(_grouped, "g", _one_of(g=(2, 4, 8)), SPATIAL_RANKS),
    "se": Kind(_same, "r", _one_of(r=(4, 16)), SPATIAL_RANKS),
    "reflect_pad": Kind(_reflected, "n", _one_of(n=(1, 3)), SPATIAL_RANKS),
    "space_softmax": Kind(_same, ranks=SPATIAL_RANKS),
    # layers along any axis
    "layer_norm": Kind(_along, "axis=-1", _draw_axis),
    "rms_norm": Kind(_along, "axis=-1", _draw_axis),
    "scale": Kind(_along, "axis=-1", _draw_axis),
    "offset": Kind(_along, "axis=-1", _draw_axis),
    "softmax": Kind(_along, "axis=-1", _draw_axis),
    "log_softmax": Kind(_along, "axis=-1", _draw_axis),
    "standardise": Kind(_along, "axis=-1", _draw_axis),
    "unit_length": Kind(_along, "axis=-1", _draw_axis),
    "center": Kind(_along, "axis=-1", _draw_axis),
    "cumsum": Kind(_along, "axis=-1", _draw_axis, integers=True),
    "cummax": Kind(_along, "axis=-1", _draw_axis, integers=True),
    "logcumsumexp": Kind(_along, "axis=-1", _draw_axis),
    "flip": Kind(_along, "axis=-1", _draw_axis, integers=True),
    "roll": Kind(_along, "n axis=-1", _draw_count(1, 16), integers=True),
    "shift": Kind(_along, "n axis=-1", _draw_count(1, 16), integers=True),
    "glu": Kind(_halved, "axis=-1", _draw_axis),
    "repeat": Kind(_repeated, "n axis=-1", lambda d, s: {**_draw_axis(d, s), "n": d.choice(2, 3)}, integers=True),
    "diff": Kind(lambda s, v: _windowed(s, {**v, "n": 2}), "axis=-1", _draw_axis, integers=True),
    "sum": Kind(_dropped, "axis=-1", _draw_axis, range(2, 6)),
    "max": Kind(_dropped, "axis=-1", _draw_axis, range(2, 6), integers=True),
    "variance": Kind(_dropped, "axis=-1", _draw_axis, range(2, 6)),
    "logsumexp": Kind(_dropped, "axis=-1", _draw_axis, range(2, 6)),
    "transpose": Kind(_turned, ranks=range(2, 6), integers=True),
    # layers that models apply to tokens
    "linear": Kind(_last, "out", _draw_linear),
    "attention": Kind(_attention, "h mask=none", _one_of(h=(1, 2, 4, 8), mask=(*MASKS, "none", "causal")), TOKEN_RANK),
    "swiglu": Kind(_last, "out", _draw_linear, TOKEN_RANK),
    "token_conv": Kind(_same, "k", _one_of(k=(3, 4, 7)), TOKEN_RANK),
    "rotary": Kind(_even, ranks=TOKEN_RANK),
    "interleave": Kind(_even, ranks=TOKEN_RANK),
    # recurrences: layers of torch.nn, and loops over steps that are written out
    "lstm": Kind(_recurrent, "out layers=1 both=0", _draw_recurrent, TOKEN_RANK),
    "gru": Kind(_recurrent, "out layers=1 both=0", _draw_recurrent, TOKEN_RANK),
    "rnn": Kind(_recurrent, "out layers=1 both=0", _draw_recurrent, TOKEN_RANK),
    "lstm_cell": Kind(_unrolled, "out", _one_of(out=(32, 64, 100)), TOKEN_RANK),
    "gru_cell": Kind(_unrolled, "out", _one_of(out=(32, 64, 100)), TOKEN_RANK),
    "moving_state": Kind(_unrolled, ranks=TOKEN_RANK),
    # layers with indices
    "embedding": Kind(_added, "v out", _one_of(v=(100, 1000), out=(16, 64, 100)), range(1, 3), "only", "float32"),
    "one_hot": Kind(_added, "n", _one_of(n=(8, 100)), range(1, 3), "only"),
    "gather": Kind(_picked, "n axis=-1", _draw_count(16, 500), range(2, 4), True),
    "select": Kind(_picked, "n axis=-1", _draw_count(16, 500), range(1, 4), True),
    "scatter_add": Kind(_picked, "n axis=-1", _draw_count(16, 500), range(2, 4), True),
    "index_add": Kind(_picked, "n axis=-1", _draw_count(16, 500), range(2, 4), True),
    "put_rows": Kind(_same, "n", _one_of(n=(3, 20)), range(2, 4), True),
    "sort": Kind(_along, "axis=-1", _draw_axis, range(1, 4), True),
    "sort_others": Kind(_along, "axis=-1", _draw_axis, range(2, 4), True),
    "topk": Kind(_largest, "n axis=-1", _draw_part, range(1, 4), True),
    "masked_fill": Kind(_same, integers=True),
    "tril": Kind(_same, ranks=range(2, 4), integers=True),
    "bucketize": Kind(_same, "n", _one_of(n=(7, 60)), ranks=range(1, 4), result="int64"),
    # sums of products
    "einsum": Kind(partial(_einsum, EINSUMS), "e out=1", lambda d, s: {"e": d.choice(*EINSUMS), "out": d.extent(16, 200)}, TOKEN_RANK),
    "einsum_self": Kind(partial(_einsum, SELF_EINSUMS), "e", _one_of(e=SELF_EINSUMS), TOKEN_RANK),
    # quantised values: rounded to steps and scaled back, or products of quantised weights
    "quantised": Kind(_same, "bits=8", _one_of(bits=(8, 8, 4))),
    "quantised_channels": Kind(_along, "axis=-1", _draw_axis),
    "int8_linear": Kind(_last, "out", _draw_linear),
    "int4_linear": Kind(lambda s, v: _last(_even(s, v), v), "out", _draw_linear),
    "int8_product": Kind(_last, "out", lambda d, s: {"out": 8 * d.extent(8, 64)}, MATRIX_RANK),
    # plain programs on matrices and points
    "stencil5": Kind(_stencil, "n=1", _one_of(n=(1, 1, 4)), MATRIX_RANK, True),
    "stencil9": Kind(_stencil, "n=1", _one_of(n=(1, 1, 3)), MATRIX_RANK),
    "edges": Kind(_stencil, ranks=MATRIX_RANK),
    "life": Kind(_stencil, "n=1", _one_of(n=(1, 2)), MATRIX_RANK, "only"),
    "moving_mean": Kind(_windowed, "n axis=-1", _draw_count(2, 16), MATRIX_RANK),
    "moving_max": Kind(_windowed, "n axis=-1", _draw_count(2, 16), MATRIX_RANK, True),
    "window_product": Kind(_windowed, "n axis=-1", _draw_count(2, 32), MATRIX_RANK),
    "n_body": Kind(_points, ranks=MATRIX_RANK),
    "distances": Kind(_pairs, ranks=MATRIX_RANK),
    "gram": Kind(lambda s, v: (s[0], s[0]), ranks=MATRIX_RANK),
    "nearest": Kind(_nearest, "n", _one_of(n=(4, 16, 60)), MATRIX_RANK),
    "histogram": Kind(lambda s, v: (number(v, "n"),), "n", _one_of(n=(16, 100, 256)), range(1, 3)),
    "bin_counts": Kind(lambda s, v: (number(v, "n"),), "n", _one_of(n=(100, 256)), range(1, 3), "only"),
    "polynomial": Kind(_same, "n", _one_of(n=(3, 8, 20))),
    "logistic": Kind(_same, "n", _one_of(n=(4, 12))),
    "black_scholes": Kind(_same),
}
