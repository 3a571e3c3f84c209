"""Weights in the order that a kernel wants: all plans that want the same order share one copy, and no copy is outdated."""
import gc

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.cpu.host import host_target
from svod.config import PrepareConfig

SPLIT = {"gemm_0": "UPCAST(o0, 2) UPCAST(o1, 16) LANES(o1.in) ORDER(out, o1,o0) STAGE(s1, root)"}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def weights(rng, k=37, n=64):
    return rng.standard_normal((k, n)).astype(np.float32)


def packed_of(plan):
    return set(plan._devices.packed.values())


def product(w):
    return svod.jit(lambda x: x @ w, config=PrepareConfig(opts=SPLIT))


def test_plans_of_two_lengths_share_a_packed_weight(rng):
    own = weights(rng)
    w = Tensor(own).clone().realize()
    f = product(w)
    for rows in (8, 12, 14):
        x = rng.standard_normal((rows, 37)).astype(np.float32)
        np.testing.assert_allclose(f(x).numpy(), x.astype(np.float64) @ own, rtol=1e-4, atol=1e-4)
    first, second, third = f.plans
    assert packed_of(first) == packed_of(second) == packed_of(third) and len(packed_of(first)) == 1
    assert second.prepare_seconds == 0.0 and first.memory.kept >= own.nbytes


@pytest.mark.parametrize(("k", "n"), [(37, 64), (64, 96), (16, 32), (48, 1), (5, 65), (128, 160)])
@pytest.mark.parametrize("tile", [16, 32, 48, 64])
@pytest.mark.parametrize("is_constant", [True, False])
def test_an_operand_stored_by_outputs_is_transposed(rng, k, n, tile, is_constant):
    """Constants by the shortest code, as they are copied once; values that are copied in each run square by square."""
    x, w = rng.standard_normal((7, k)).astype(np.float32), weights(rng, n, k)
    config = PrepareConfig(opts={"gemm_0": f"UPCAST(o1, {min(tile, n)}) LANES(o1.in) STAGE(s1, root)" if n > 1 else ""})
    right = Tensor(w)
    if is_constant:
        run = svod.jit(lambda x: x @ right.T, config=config)
        y, plan = run(x), run.plans[0]
    else:
        y = Tensor(x) @ right.T
        plan = y.prepare(config)
        plan.execute()
    np.testing.assert_allclose(y.numpy(), x.astype(np.float64) @ w.T, rtol=1e-4, atol=1e-4)
    lanes = host_target(1).vector_bytes // 4
    if min(k, n) >= lanes and n % tile == 0 and tile % lanes == 0:
        packing = plan.kernels[0].views.linear().split("phase")[1]
        assert packing.count("SHUFFLE") == (0 if is_constant else lanes * (lanes.bit_length() - 1))
        assert not is_constant or len(packing.splitlines()) < 40


@pytest.mark.parametrize(("channels", "outputs", "size"), [(3, 32, 3), (16, 48, 1), (7, 33, 5), (1, 64, 7), (64, 16, 2)])
def test_weights_of_convolutions_are_packed_right(rng, channels, outputs, size):
    x = rng.standard_normal((2, channels, 9, 11)).astype(np.float32)
    w = rng.standard_normal((outputs, channels, size, size)).astype(np.float32)
    right = Tensor(w)
    found = svod.jit(lambda x: x.conv2d(right))(x).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (size, size), axis=(2, 3))
    np.testing.assert_allclose(found, np.einsum("nchwij,ocij->nohw", windows, w), rtol=1e-3, atol=1e-3)


def test_a_narrow_weight_stays_narrow(rng):
    """A narrow weight is not kept in 32 bits: neither its transpose, nor a constant product with it."""
    w = Tensor(weights(rng)).cast("bfloat16")
    f = svod.jit(lambda x: x @ (w * 2))
    x = Tensor(rng.standard_normal((8, 37)).astype(np.float32)).cast("bfloat16").realize()
    want = x.cast("float32").numpy() @ (w.cast("float32").numpy() * 2)
    np.testing.assert_allclose(f(x).cast("float32").numpy(), want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
    types = {dtype.name for kernel in f.plans[0].kernels for dtype, _ in kernel.spec.params}
    assert types == {"bfloat16"}


def test_a_weight_that_is_assigned_to_is_packed_anew(rng):
    w = Tensor(weights(rng)).clone().realize()
    f, g = product(w), product(w)
    x = rng.standard_normal((8, 37)).astype(np.float32)
    f(x)
    (before,) = f.plans
    new = weights(rng)
    w.assign(Tensor(new)).realize()
    for call in (g, f):
        np.testing.assert_allclose(call(x).numpy(), x.astype(np.float64) @ new, rtol=1e-4, atol=1e-4)
    assert packed_of(g.plans[0]) == packed_of(f.plans[0]) != packed_of(before)


@pytest.mark.slow
def test_an_array_of_numpy_that_was_free_to_change_is_packed_anew(rng):
    array = weights(rng)
    w = Tensor(array)
    f = product(w)
    x = rng.standard_normal((8, 37)).astype(np.float32)
    f(x)
    (held,) = f.plans       # this plan stays alive, with its packed weights
    del f
    gc.collect()
    array[:] = weights(rng)
    g = product(w)
    np.testing.assert_allclose(g(x).numpy(), x.astype(np.float64) @ array, rtol=1e-4, atol=1e-4)
    assert packed_of(held).isdisjoint(packed_of(g.plans[0]))


def test_prepared_plans_share_what_svod_owns_and_pack_what_others_may_write(rng):
    x = Tensor(rng.standard_normal((8, 37)).astype(np.float32))
    array = weights(rng)
    for w, shared in ((Tensor(array).clone().realize(), True), (Tensor(array), False)):
        plans = [(x @ w).prepare(PrepareConfig(opts=SPLIT), constants=[w]) for _ in range(2)]
        assert (packed_of(plans[0]) == packed_of(plans[1])) is shared and all(packed_of(p) for p in plans)
        for plan in plans:
            plan.execute()
            np.testing.assert_allclose(plan.output_buffer().reshape(8, 64), x.numpy().astype(np.float64) @ array, rtol=1e-4, atol=1e-4)


def test_what_two_plans_pack_differently_is_not_shared(rng):
    own = weights(rng)
    w = Tensor(own).clone().realize()
    x = rng.standard_normal((8, 37)).astype(np.float32)
    wide = {"gemm_0": "UPCAST(o0, 2) UPCAST(o1, 32) LANES(o1.in) ORDER(out, o1,o0) STAGE(s1, root)"}
    functions = [product(w), svod.jit(lambda x: x @ w, config=PrepareConfig(opts=wide))]
    for f in functions:
        np.testing.assert_allclose(f(x).numpy(), x.astype(np.float64) @ own, rtol=1e-4, atol=1e-4)
    first, second = (packed_of(f.plans[0]) for f in functions)
    assert first and second and first.isdisjoint(second)


def test_constants_that_are_computed_once_are_shared_too(rng):
    own = weights(rng)
    w = Tensor(own).clone().realize()
    f = svod.jit(lambda x: x @ (w.exp() * 2))
    for rows in (8, 12):
        x = rng.standard_normal((rows, 37)).astype(np.float32)
        np.testing.assert_allclose(f(x).numpy(), x.astype(np.float64) @ (np.exp(own.astype(np.float64)) * 2), rtol=1e-4, atol=1e-3)
    stored = [{b.storage for b in plan.buffers if b.kind == "constant"} for plan in f.plans]
    assert stored[0] == stored[1] and len(stored[0]) == 1
