"""Recurrent layers, unrolled step by step: both directions, peepholes, activations, sequence lengths."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from svod.errors import UnsupportedError
from svod.onnx.operators.activations import hard_sigmoid
from svod.onnx.registry import OnnxNode, operator
from svod.tensor import Tensor, where

# a function from (product of the weights with the input, last state) to the next state
Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


# The activations that a layer may name, with the defaults of their alpha and beta.
ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "sigmoid": (Tensor.sigmoid, ()), "tanh": (Tensor.tanh, ()), "relu": (Tensor.relu, ()), "softsign": (Tensor.softsign, ()),
    "softplus": (Tensor.softplus, ()), "leakyrelu": (Tensor.leaky_relu, (0.01,)), "elu": (Tensor.elu, (1.0,)),
    "hardsigmoid": (hard_sigmoid, (0.2, 0.5)), "affine": (lambda x, alpha, beta: x.mul(alpha).add(beta), (1.0, 0.0)),
    "scaledtanh": (lambda x, alpha, beta: x.mul(beta).tanh().mul(alpha), (1.0, 1.0))}


def activation(node: OnnxNode, at: int, default: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """The activation at position `at` of a layer, with its alpha and beta. The attributes list these only for activations that have
    them."""
    names = [name.lower() for name in node.get("activations") or []]
    name = names[at] if at < len(names) else default[at % len(default)].lower()
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"{node} with the activation {name!r}")
    function, parameters = ACTIVATIONS[name][0], list(ACTIVATIONS[name][1])
    for i, attribute in enumerate(("activation_alpha", "activation_beta")[:len(parameters)]):
        place, values = sum(n in ACTIVATIONS and len(ACTIVATIONS[n][1]) > i for n in names[:at]), node.get(attribute) or []
        parameters[i] = values[place] if place < len(values) else parameters[i]
    return lambda x: function(x, *parameters)


def clipped(node: OnnxNode, x: Tensor) -> Tensor:
    limit = node.get("clip")
    return x if not limit else x.clamp(-limit, limit)


def run(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor | None, states: Sequence[Tensor | None], hidden: int,
        step_of: Callable[[int], Step]) -> tuple[Tensor, ...]:
    """Run all directions of a layer: returns the outputs of all steps (steps, directions, batch, hidden), and the last states. One product
    of a direction's weights w[d] serves the inputs of all steps."""
    batch_first = node.get("layout", 0) == 1
    t = x.transpose(0, 1) if batch_first else x
    steps, batch = t.shape[:2]
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[node.get("direction", "forward")]
    from svod.nn.recurrent import check_steps  # imported late: most models have no such layer
    check_steps(str(node), steps, len(backwards))
    outputs, finals = [], []
    for d, reverse in enumerate(backwards):
        given = [s if s is None or not batch_first else s.transpose(0, 1) for s in states]
        state = tuple(Tensor.zeros(batch, hidden, dtype=x.dtype) if s is None else s[d] for s in given)
        step, seen = step_of(d), []
        products = t.linear(w[d], halves(bias, d, w.shape[1])[0]).contiguous()
        for i in reversed(range(steps)) if reverse else range(steps):
            new = step(products[i], state)
            if lengths is not None:
                alive = lengths.gt(i).reshape(-1, 1)
                seen.append(where(alive, new[0], new[0].mul(0)))
                new = tuple(where(alive, a, b) for a, b in zip(new, state, strict=True))
            else:
                seen.append(new[0])
            state = new
        outputs.append(Tensor.stack(list(reversed(seen)) if reverse else seen, 0))
        finals.append(state)
    y = Tensor.stack(outputs, 1)
    last = [Tensor.stack([f[i] for f in finals], 0) for i in range(len(states))]
    if batch_first:
        return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last)
    return y, *last


def halves(bias: Tensor | None, d: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Split the bias of direction d into those of the input and of the recurrence."""
    return (None, None) if bias is None else (bias[d][:size], bias[d][size:])


@operator("RNN")
def rnn(node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None) -> tuple[Tensor, ...]:
    hidden = r.shape[-1]

    def step_of(d: int) -> Step:
        rb = halves(bias, d, hidden)[1]
        f = activation(node, d, ["Tanh"])

        def step(given: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (f(clipped(node, given.add(state[0].linear(r[d], rb)))),)
        return step
    return run(node, x, w, bias, lengths, [h], hidden, step_of)


@operator("GRU")
def gru(node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
        h: Tensor | None = None) -> tuple[Tensor, ...]:
    n = r.shape[-1]

    def step_of(d: int) -> Step:
        rb = halves(bias, d, 3 * n)[1]
        f, g = activation(node, 2 * d, ["Sigmoid", "Tanh"]), activation(node, 2 * d + 1, ["Sigmoid", "Tanh"])
        after = node.get("linear_before_reset", 0)
        first = r[d] if after else r[d][:2 * n]     # the weights that multiply the last state before it is reset, in one product

        def step(given: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            before = state[0]
            kept = before.linear(first, None if rb is None else rb[:first.shape[0]])
            update = f(clipped(node, given[:, :n].add(kept[:, :n])))
            reset = f(clipped(node, given[:, n:2 * n].add(kept[:, n:2 * n])))
            own = None if rb is None else rb[2 * n:]
            inner = reset.mul(kept[:, 2 * n:]) if after else reset.mul(before).linear(r[d][2 * n:], own)
            new = g(clipped(node, given[:, 2 * n:].add(inner)))
            return (update.neg().add(1.0).mul(new).add(update.mul(before)),)
        return step
    return run(node, x, w, bias, lengths, [h], n, step_of)


@operator("LSTM")
def lstm(node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
         h: Tensor | None = None, c: Tensor | None = None, peepholes: Tensor | None = None) -> tuple[Tensor, ...]:
    n = r.shape[-1]
    default = ["Sigmoid", "Tanh", "Tanh"]

    def step_of(d: int) -> Step:
        rb = halves(bias, d, 4 * n)[1]
        f, g, out = (activation(node, 3 * d + i, default) for i in range(3))
        p = None if peepholes is None else [peepholes[d][i * n:(i + 1) * n] for i in range(3)]    # for the input, output and forget gates

        def step(given: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            before, cell = state
            gates = given.add(before.linear(r[d], rb))
            i, o, forget, candidate = (gates[:, k * n:(k + 1) * n] for k in range(4))
            i = f(clipped(node, i if p is None else i.add(p[0].mul(cell))))
            if node.get("input_forget", 0):
                forget = i.neg().add(1.0)
            else:
                forget = f(clipped(node, forget if p is None else forget.add(p[2].mul(cell))))
            new = forget.mul(cell).add(i.mul(g(clipped(node, candidate))))
            o = f(clipped(node, o if p is None else o.add(p[1].mul(new))))
            return o.mul(out(new)), new
        return step
    return run(node, x, w, bias, lengths, [h, c], n, step_of)
