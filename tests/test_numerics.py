"""Plans under the policy "same": a row has the same bits in every batch, on one core and on two, with weights or with arguments."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from svod import PrepareConfig, Tensor
from svod.compile.backend import target_with
from svod.config import NUMERICS, BeamConfig
from svod.core.machine.target import POLICIES, SAME
from svod.errors import ConfigError, UnsupportedError
from svod.tune.resolved import resolve

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Function = Callable[..., Tensor]
ROWS = (64, 7, 1)


def numbers(*shape: int) -> Array:
    """Numbers of both signs and several magnitudes."""
    rng = np.random.default_rng(shape)
    drawn: Array = (rng.uniform(-1, 1, shape) * 2.0 ** rng.integers(-3, 3, shape)).astype(np.float32)
    return drawn


def heads(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 2, 9, 16)


def attended(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each row's queries to the same keys."""
    return heads(x).scaled_dot_product_attention(k.expand(x.shape[0], 2, 37, 16), v.expand(x.shape[0], 2, 37, 16))


#: name → (function, shape of a row, weights)
FUNCTIONS: dict[str, tuple[Function, tuple[int, ...], Sequence[Array]]] = {
    "linear": (lambda x, w, b: x.linear(w, b), (300,), [numbers(100, 300), numbers(100)]),
    "long linear": (lambda x, w: x.linear(w), (1000,), [numbers(37, 1000)]),
    "matmul": (lambda x, w: x @ w, (300,), [numbers(300, 100)]),
    "linear and gelu": (lambda x, w, b: x.linear(w, b).gelu(), (300,), [numbers(100, 300), numbers(100)]),
    "two layers": (lambda x, w, v: x.linear(w).relu().matmul(v).softmax(-1), (300,), [numbers(100, 300), numbers(100, 10)]),
    "softmax": (lambda x: x.softmax(-1), (300,), []),
    "layer_norm": (lambda x, g, b: x.layer_norm(300, g, b), (300,), [numbers(300), numbers(300)]),
    "rms_norm": (lambda x, g: x.rms_norm(300, g), (300,), [numbers(300)]),
    "sum": (lambda x: x.sum(-1), (5000,), []),
    "variance": (lambda x: x.var(-1), (700,), []),
    "convolution": (lambda x, w: x.conv2d(w, padding=1), (5, 13, 11), [numbers(8, 5, 3, 3)]),
    "convolution of stride 2": (lambda x, w: x.conv2d(w, padding=1, stride=2), (5, 13, 11), [numbers(8, 5, 3, 3)]),
    "convolution 1×1": (lambda x, w: x.conv2d(w).relu(), (5, 13, 11), [numbers(16, 5, 1, 1)]),
    "depthwise convolution": (lambda x, w: x.conv2d(w, padding=1, groups=5), (5, 13, 11), [numbers(5, 1, 3, 3)]),
    "average pool": (lambda x: x.mean((2, 3)), (5, 13, 11), []),
    "attention": (attended, (288,), [numbers(2, 37, 16), numbers(2, 37, 16)]),
    "causal attention": (lambda x: heads(x).scaled_dot_product_attention(heads(x), heads(x), is_causal=True), (288,), []),
    "cumulative sum": (lambda x: x.cumsum(-1), (3000,), []),
}


def result(name: str, rows: int, threads: int, constant: bool) -> Array:
    """The values of a function of the first `rows` rows. `constant`: its weights are constants of the plan."""
    function, shape, weights = FUNCTIONS[name]
    given = [Tensor(w) for w in weights]
    y = function(Tensor(numbers(max(ROWS), *shape)[:rows]), *given)
    plan = y.prepare(PrepareConfig(numerics=SAME, threads=threads, db=":none:"), constants=given if constant else [])
    plan.execute()
    values: Array = y.numpy()
    return values


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_do_not_depend_on_the_batch_or_on_threads(name: str) -> None:
    for constant in (True, False) if FUNCTIONS[name][2] else (False,):
        want = result(name, max(ROWS), 2, constant)
        for rows, threads in list(product(ROWS, (2, 1)))[1:]:
            assert result(name, rows, threads, constant).tobytes() == want[:rows].tobytes(), f"{rows} rows, {threads} threads, {constant}"


def test_scattered_additions_do_not_depend_on_threads() -> None:
    """A core adds all values of a place in their order."""
    index, values = np.random.default_rng(0).integers(0, 8, 200_000), numbers(200_000)

    def added(threads: int) -> bytes:
        y = Tensor(np.zeros(8, np.float32)).scatter_add(0, Tensor(index), Tensor(values))
        plan = y.prepare(PrepareConfig(numerics=SAME, threads=threads, db=":none:"))
        plan.execute()
        return bytes(y.numpy().tobytes())
    assert added(1) == added(2)


def test_a_search_keeps_the_bits() -> None:
    x, w = numbers(9, 200), numbers(31, 200)

    def product_with(config: PrepareConfig) -> bytes:
        y = Tensor(x).linear(Tensor(w))
        plan = y.prepare(config)
        plan.execute()
        return bytes(y.numpy().tobytes())
    beam = BeamConfig(width=2, budget=3, executor="inline", seed=1)
    assert product_with(PrepareConfig(numerics=SAME, db=":none:", beam=beam)) == product_with(PrepareConfig(numerics=SAME, db=":none:"))


def test_unknown_policies_name_the_three(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="accepted: one of same, float32, fast"):
        PrepareConfig(numerics="any")
    assert [PrepareConfig(numerics=policy).numerics for policy in ("same", "float32", "fast", None)] == ["same", "float32", "fast", None]
    monkeypatch.setenv("SVOD_NUMERICS", "all")
    with pytest.raises(ConfigError, match="SVOD_NUMERICS='all' is not usable; accepted: one of same, float32, fast"):
        PrepareConfig.from_env()


def test_options_and_targets_know_the_same_policies() -> None:
    assert NUMERICS == POLICIES


def test_the_environment_chooses_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_NUMERICS", "same")
    assert PrepareConfig.from_env().numerics == SAME == PrepareConfig().in_environment().numerics
    assert resolve(PrepareConfig(numerics="float32").in_environment()).target.numerics == "float32"


def test_the_target_of_a_key_has_its_policy() -> None:
    target = resolve(PrepareConfig(numerics=SAME)).target
    found = target_with(target.key)
    assert found is not None and found == target


def test_devices_with_groups_do_not_have_it() -> None:
    with pytest.raises(UnsupportedError, match="numerics='same' is for CPUs"):
        resolve(PrepareConfig(device="CUDA:sm_90", numerics=SAME))
