"""ONLINE: the fused pass over blocks for maximum, exp, sum and weighted sum of a row gives the results of the separate passes."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.config import NONE, PrepareConfig
from svod.core.cost.sketch import sketches
from svod.core.cost.sketch_online import ATTENTION
from svod.core.cost.template import schedule
from svod.core.graph import graph
from svod.core.ir.dtype import BY_NAME, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.algorithms.online import Limit, kept_blocks, masked_limits
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.intrinsics import normal_power, operands_of, source_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.core.tree.show import print_nest
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case, run_interpreted, run_native, steps
from tests.chains import random_state
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import data, kernel_of
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]
TARGETS = list(runnable_targets().values())
EXTENTS = (1, 2, 3, 5, 7, 13, 16, 17, 31)


def peak_of(kernel: Kernel) -> str:
    """Return the stage of the maximum."""
    return next(s.name for s in kernel.stages if s.value.arg == ("MAX", 1))


def online(kernel: Kernel, block: int) -> Scheduler:
    return apply_opt(Scheduler(kernel, AVX512), Opt("ONLINE", peak_of(kernel), block))


def attention(heads: int, queries: int, keys: int, width: int, columns: int, causal: bool = False, dtype: str = "float32") -> Tensor:
    q, k, v = (data(heads, n, w, dtype=dtype) for n, w in ((queries, width), (keys, width), (keys, columns)))
    return q.scaled_dot_product_attention(k, v, is_causal=causal)


KINDS = {
    "attention": lambda rng: attention(rng.choice((1, 2, 3)), *(rng.choice(EXTENTS) for _ in range(4))),
    "pooling": lambda rng: attention(2, rng.choice(EXTENTS), rng.choice(EXTENTS), 3, 1),    # the stage of the sum divides by it, too
    "causal": lambda rng: attention(2, rng.choice(EXTENTS), rng.choice(EXTENTS), 3, 5, causal=True),
    "rounded": lambda rng: attention(2, *(rng.choice(EXTENTS) for _ in range(4)), causal=rng.random() < 0.5,
                                     dtype="bfloat16"),
    "softmax": lambda rng: data(rng.choice(EXTENTS), 4 * rng.choice(EXTENTS)).softmax(-1),
    "softmax_columns": lambda rng: data(2, rng.choice(EXTENTS), rng.choice(EXTENTS)).softmax(1),
    "log_softmax": lambda rng: data(rng.choice(EXTENTS), rng.choice(EXTENTS)).log_softmax(-1),
    "computed": lambda rng: (data(3, rng.choice(EXTENTS)) * data(1) + data(3, 1)).softmax(-1),
    "flipped": lambda rng: data(3, rng.choice(EXTENTS)).flip(1).softmax(-1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_chain_computes_what_the_kernel_did(kind: str) -> None:
    rng = random.Random(kind)
    done = 0
    for _ in range(50):
        if done == 5:
            break
        kernel = Kernel(kernel_of(KINDS[kind](rng)))
        row = max((kernel.axes[s.reds[0]].extent for s in kernel.stages if s.value.arg == ("MAX", 1)), default=1)
        if row < 3:
            continue    # a row of two positions has no blocks
        case = Case(kernel, seed=done)
        target = rng.choice(TARGETS)
        block = rng.randint(2, row - 1)
        start = apply_opt(Scheduler(kernel, target), Opt("ONLINE", peak_of(kernel), block))
        state = random_state(rng, start, rng.randint(1, 8))
        program = lower(state)
        validate(program)
        done += 1
        try:
            if steps(program) <= 30_000:
                run_interpreted(case, program, rng.randint(1, 3))
            if program.size <= 4000:
                run_native(case, program, target, rng.randint(1, 3))
        except AssertionError as e:
            raise AssertionError(f"{kernel}, {state.applied_opts}: {e}") from e
    assert done == 5


@pytest.mark.parametrize("kind", ["softmax", "attention"])
@pytest.mark.parametrize(("keys", "block"), a_half([(17, 4), (24, 8), (31, 30)]))
def test_infinities_and_nans_fall_where_they_did(kind: str, keys: int, block: int) -> None:
    rng = np.random.default_rng(keys)
    x = rng.standard_normal((9, keys)).astype(np.float32) * 30
    x[0] = -np.inf                      # no key at all
    x[1, :block] = -np.inf              # none in the first block
    x[2, block:] = -np.inf              # none but in the first one
    x[3, keys - 1] = np.inf
    x[4, 0] = np.nan
    x[5] = 3e38
    x[6, ::2] = -3e38
    values = rng.standard_normal((keys, 3)).astype(np.float32)
    with np.errstate(all="ignore"):
        y = x.astype(np.float64)
        weights = np.exp(y - y.max(1, keepdims=True))
        want = weights / weights.sum(1, keepdims=True)
    if kind == "softmax":
        tensor, inputs = data(9, keys).softmax(-1), [x]
    else:       # the queries are 0, so the scores are the mask alone; every row is declared to have keys
        tensor, want = data(9, 2).scaled_dot_product_attention(data(keys, 2), data(keys, 3), data(9, keys)), want @ values
        inputs = [x, values, np.zeros((9, 2), np.float32), np.ones((keys, 2), np.float32), np.ones(9, np.bool_)]
    kernel = Kernel(kernel_of(tensor))
    by_size = {a.size: a.ravel() for a in inputs}
    case = Case(kernel)
    case.args = [np.zeros(want.size, np.float32) if p.arg.slot in kernel.outs else by_size[p.arg.size].copy() for p in kernel.params]
    case.want = [want.astype(np.float32).ravel()]
    new = online(kernel, block)
    np.testing.assert_allclose(evaluate(new.kernel.ast, case.args)[0], case.want[0], rtol=1e-5, atol=1e-6)
    run_interpreted(case, lower(new), 2)
    for target in TARGETS:
        run_native(case, lower(apply_opts(Scheduler(kernel, target), new.applied_opts)), target, 2)


@pytest.mark.parametrize("kind", a_half(["divided", "padded", "reciprocals"]))
def test_what_is_weighted_is_zero_beyond_a_row_that_its_blocks_do_not_divide(kind: str) -> None:
    """Values beyond the end of a row must be 0. Gated loads give 0, but a quotient by such a load, or infinite padding, would give 0 · inf
    with the weight 0."""
    weights = (data(2, 5, 3) @ data(2, 3, 17)).softmax(-1)
    kernel = Kernel(kernel_of({"divided": lambda: (weights / data(17)) @ data(2, 17, 7),
                               "padded": lambda: weights @ data(2, 17, 7).pad(((0, 0), (0, 0), (1, 0)), value=float("inf")),
                               "reciprocals": lambda: weights @ data(2, 17, 7).reciprocal()}[kind]()))
    case = Case(kernel, seed=1)
    assert np.isfinite(case.want[0]).any()
    with np.errstate(invalid="ignore"):
        run_interpreted(case, lower(online(kernel, 4)), 2)


def test_masked_attention_gives_zeros_for_rows_without_a_key() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 7, 5), (2, 23, 5), (2, 23, 11)))
    mask = rng.random((7, 23)) < 0.3
    mask[2] = False
    mask[3, :8] = False
    y = Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(mask))
    kernel = Kernel(create_schedule(graph.sink(y.uop)).calls[-1].ast)
    chain: Any = [["ONLINE", peak_of(kernel), 8], ["TILE", "o1", 4], ["ORDER", "out", ["o1", "r0", "o1.in", "o2"]], ["UPCAST", "o2", 0],
             ["STAGE", "s2", "r0"], ["UPCAST", "s2.o2", 0]]
    plan = y.prepare(PrepareConfig(opts={kernel.key: chain}, db=NONE))
    plan.execute()
    scores = np.where(mask, q.astype(np.float64) @ k.transpose(0, 2, 1) / np.sqrt(5), -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.nan_to_num(weights / weights.sum(-1, keepdims=True)) @ v
    np.testing.assert_allclose(y.numpy(), want, rtol=2e-5, atol=2e-6)
    assert not y.numpy()[:, 2].any()


def test_the_loops_of_attention() -> None:
    state = apply_opts(online(Kernel(kernel_of(attention(1, 6, 12, 4, 8))), 4), [
        Opt("TILE", "o0", 3), Opt("ORDER", "out", ("o0", "r0", "o0.in", "o1")), Opt("STAGE", "s2", "r0"), Opt("STAGE", "s4", "r0"),
        Opt("STAGE", "s7", "r0"), Opt("UPCAST", "o1", 8), Opt("UPCAST", "s7.o1", 8)])
    assert print_nest(state) == """\
phase 0: out → p0
  for o0 in 0…6 by 3
    tile o1 8 (vector)
    acc = (-inf, 0, 0)
    reduce r0 in 0…3
      stage s2[3, 4] in scratch:
        for s2.o0 in 0…3
          for s2.o1 in 0…4
            acc = 0
            reduce s2.r0 in 0…4
              acc += p1[4·s2.o0 + s2.r0] · p2[4·s2.o1 + s2.r0]
            s2[s2.o0, s2.o1] = acc · 0.5
      stage s3[3, 1] in scratch:
        for s3.o0 in 0…3
          acc = -inf
          reduce s3.r0 in 0…4
            acc = max(acc, s2[s3.o0, 4·s3.o1 + s3.r0])
          s3[s3.o0, s3.o1] = acc
      copy s4[3, 1, 4], laid out in the order it is read:
        for i in 0…3
          tile k 4 (vector)
          s4[i, j, k] = exp(s2[i, 4·j + k] - where(s3[i, j] == -inf, 0, s3[i, j]))
      stage s7[3, 8, 1] in scratch:
        for s7.o0 in 0…3
          tile s7.o1 8 (vector)
          acc = 0
          reduce s7.r0 in 0…4
            acc += s4[s7.o0, s7.o2, s7.r0] · p3[32·s7.o2 + 8·s7.r0 + s7.o1]
          s7[s7.o0, s7.o1, s7.o2] = acc
      for o0 in 0…3
        stage s5 in a register:
          acc = 0
          reduce s5.r0 in 0…4
            acc += s4[s5.o0, s5.o1, s5.r0]
          s5[s5.o0, s5.o1] = acc
        acc = expsum(acc, (s3[o0, r0], s5[o0, r0], s7[o0, o1, r0]))
    for all o0: p0[8·o0 + o1] = acc.2 · (1 / acc.1)"""


@pytest.mark.parametrize(("dtype", "keys"), [("bfloat16", 24), ("float16", 17)])
def test_weights_are_rounded_after_they_were_added_up(dtype: str, keys: int) -> None:
    """The sum of a block's weights reads them unrounded, and its product with the values reads them rounded. Both factors of that product
    are stages along the positions of a block, as matrix instructions need."""
    kernel = online(Kernel(kernel_of(attention(2, 6, keys, 4, 8, dtype=dtype))), 8).kernel
    m, s, a = (kernel.resolve(frozenset())[kernel.output].nodes[v].arg       # type: ignore[union-attr]
               for v in kernel.resolve(frozenset())[kernel.output].reductions[0].values)     # type: ignore[union-attr]
    weights, = kernel.reads[s]
    rounded, values = kernel.reads[a]
    assert kernel.reads[rounded] == (weights,) and m in kernel.reads[weights]
    assert source_of(kernel.stages[rounded]) == source_of(kernel.stages[values]) == BY_NAME[dtype] != kernel.stages[weights].dtype
    operands_of(kernel, kernel.resolve(frozenset())[a], kernel.stages[a].reds[0])       # type: ignore[arg-type]


@pytest.mark.parametrize("scale", a_half([3.7, 1e-3, -0.5, 0.0]))
@pytest.mark.parametrize("causal", [False, True])
def test_a_positive_factor_of_scores_of_16_bits_is_taken_once_for_a_row(scale: float, causal: bool) -> None:
    """With a positive factor, the largest score has the largest sum, so the factor is applied once to the maximum of a row; sums are not
    rounded before it."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((2, 19, 5), (2, 23, 5), (2, 23, 11)))
    y = Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), is_causal=causal, scale=scale)
    kernel = Kernel(create_schedule(graph.sink(y.uop)).calls[-1].ast)
    state = online(kernel, 8)

    def inside(s: int, *ops: Ops) -> list[UOp]:
        return [u for u in state.kernel.stages[s].value.toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op in ops and u.dtype.is_float]
    row, = (s.index for s in state.kernel.stages if any(u.arg == ("MAX", 1) for u in inside(s.index, Ops.REDUCE)))
    scores, = state.kernel.reads[row]
    assert len(inside(scores, Ops.MUL)) == 1 + (scale <= 0) and not inside(scores, Ops.CAST)     # the product that is summed up
    y.prepare(PrepareConfig(opts={kernel.key: [["ONLINE", peak_of(kernel), 8]]}, db=NONE)).execute()
    exact = q.astype(np.float64) @ k.transpose(0, 2, 1) * scale
    exact = np.where(np.tri(19, 23, dtype=np.bool_), exact, -np.inf) if causal else exact
    weights = np.exp(exact - exact.max(-1, keepdims=True))
    np.testing.assert_allclose(y.numpy(), weights / weights.sum(-1, keepdims=True) @ v, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dtype", "powers"), [(np.float16, 1), (np.float32, 0)])
def test_weights_of_16_bits_are_powers_of_two(dtype: type[np.floating[Any]], powers: int) -> None:
    """Some GPUs have an instruction for powers of two; a power below the normal numbers becomes 0."""
    q, k, v = (Tensor(np.ones(s, dtype)) for s in ((19, 5), (23, 5), (23, 11)))
    kernel = Kernel(create_schedule(graph.sink(q.scaled_dot_product_attention(k, v).uop)).calls[-1].ast)
    stages = [r for r in online(kernel, 8).kernel.resolve(frozenset()) if r is not None]
    assert sum(normal_power(r, n) >= 0 for r in stages for n in r.nodes) == powers


def test_components_that_positions_share_are_carried_once() -> None:
    """A tile of four rows of two vectors carries four maxima, four sums of weights, and eight vectors of weighted values."""
    chain = [Opt("UPCAST", "o0", 4), Opt("UPCAST", "o1", 0)]
    kernel = Kernel(kernel_of(attention(1, 4, 24, 4, 32)))
    program = lower(apply_opts(online(kernel, 8), chain))
    carried = [i.lanes for i in program.code[0] if i.op == "CARRY" and i.dtype == dtypes.float32]
    assert sorted(carried)[-16:] == [1] * 8 + [16] * 8
    run_interpreted(Case(kernel, seed=1), program, 1)


@pytest.mark.parametrize(("keys", "block"), [(64, 16), (67, 16), (40, 7)])
def test_limits_of_a_causal_mask(keys: int, block: int) -> None:
    """For tiles of rows, the blocks with unmasked positions are the ones that a count over all positions finds."""
    kernel = online(Kernel(kernel_of(attention(2, 24, keys, 3, 5, causal=True))), block).kernel
    limit, = masked_limits(kernel)
    count = -(-keys // block)
    for first, last in ((0, 0), (0, 7), (5, 20), (23, 23)):
        kept = [b for b in range(count) if any(b * block + i <= q for q in range(first, last + 1) for i in range(block))]
        assert range(*limit.blocks(first, last, count)) == range(kept[0], kept[-1] + 1)
    assert kept_blocks(kernel, [limit], count, [24] * len(kernel.stages[kernel.output].outs)) == limit.blocks(0, 23, count)[1]
    assert not masked_limits(online(Kernel(kernel_of(attention(2, 24, keys, 3, 5))), block).kernel)


@pytest.mark.parametrize("seed", range(20))
def test_limits_of_any_comparison(seed: int) -> None:
    rng = random.Random(seed)
    limit = Limit(0, rng.randint(-40, 40), rng.choice((-3, -1, 1, 2)), rng.choice((-9, -1, 2, 8)))
    first = rng.randint(0, 20)
    last, count = first + rng.randint(0, 9), rng.randint(1, 9)
    kept = {b for b in range(count) for q in range(first, last + 1) if limit.const + limit.step * q + limit.apart * b >= 0}
    assert set(range(*limit.blocks(first, last, count))) == kept


SOFTMAX, WEIGHTS = data(4, 12).softmax(-1), (data(2, 5, 3) @ data(2, 3, 12)).softmax(-1)
REFUSED: list[tuple[Tensor, str, Any, str]] = [
    (SOFTMAX, "s1", 12, "2 to 11 of the 12"),
    (SOFTMAX, "s1", 1, "2 to 11 of the 12"),
    (SOFTMAX, "s1", None, "an int"),
    (SOFTMAX, "s1", True, "an int"),
    (SOFTMAX, "s3", 4, "not the maximum"),
    (data(4, 12).flip(1).reshape(2, 24).softmax(-1), "s1", 7, "over one reduce axis"),
    (SOFTMAX, "out", 4, "not the maximum"),
    (SOFTMAX, "s9", 4, "no stage 's9'"),
    (data(4, 12) - data(4, 12).max(1, keepdim=True), "s1", 4, "sums up exp"),
    (data(4, 12).logsumexp(1), "s1", 4, "not the maximum"),
    ((data(4, 5) @ data(5, 12)).flip(1).softmax(-1) @ data(12, 3), "s3", 5, "position by position"),
    (WEIGHTS.square() @ data(2, 12, 7), "s3", 3, "computed twice"),
]


@pytest.mark.parametrize(("tensor", "stage", "block", "why"), REFUSED, ids=[r[3] for r in REFUSED])
def test_what_is_refused(tensor: Tensor, stage: str, block: Any, why: str) -> None:
    with pytest.raises(KernelOptError, match=why):
        apply_opt(Scheduler(Kernel(kernel_of(tensor)), AVX512), Opt("ONLINE", stage, block))


def test_it_comes_first() -> None:
    state = apply_opt(Scheduler(Kernel(kernel_of(SOFTMAX)), AVX512), Opt("UPCAST", "o1", 4))
    with pytest.raises(KernelOptError, match="before all other opts"):
        apply_opt(state, Opt("ONLINE", "s1", 4))


def test_states_of_other_blocks_are_others() -> None:
    kernel = Kernel(kernel_of(SOFTMAX))
    states = [Scheduler(kernel, AVX512), online(kernel, 4), online(kernel, 6), online(kernel, 5)]
    assert len({s.digest for s in states}) == 4
    assert online(kernel, 4).digest == states[1].digest


@pytest.mark.parametrize(("queries", "keys", "columns"), a_half([(7, 600, 40), (3, 768, 8), (101, 531, 17)]))
def test_sketches_of_long_rows(queries: int, keys: int, columns: int) -> None:
    """Row lengths are primes or multiples of a block, with fewer and more queries than a tile; short rows have no such sketches."""
    case = Case(Kernel(kernel_of(attention(2, queries, keys, 5, columns))))
    target = TARGETS[-1]
    found = list(schedule(ATTENTION, Scheduler(case.kernel, target)))
    assert found and all(state.applied_opts[0].op == "ONLINE" for state in found)
    assert any(s.applied_opts[0].op == "ONLINE" for s in sketches(Scheduler(case.kernel, target)))
    run_native(case, lower(found[0]), target, 3)
    assert not list(schedule(ATTENTION, Scheduler(Kernel(kernel_of(attention(2, queries, 128, 5, columns))), target)))
    rounded = Kernel(kernel_of(attention(2, queries, keys, 5, columns, dtype="bfloat16")))
    assert not list(schedule(ATTENTION, Scheduler(rounded, target)))
