"""The suites: their kernels, operands determined by a seed, and agreement of svod and each library with the reference at small sizes."""
from __future__ import annotations

import math
import platform
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from svod import Tensor
from svod.bench.peers import PEER_LIBRARIES, Peer, load_peers, parse_peers
from svod.bench.suites import cases as kinds
from svod.bench.suites.cases import Case, CaseOperand
from svod.bench.suites.gpu_kernels import GPU, gpu_cases, is_gpu
from svod.bench.suites.random_kernels import LEAST_SECONDS, MOST_SECONDS, is_prime, nominal_seconds, random_cases
from svod.bench.suites.reference import REFERENCES, largest_error, reference, widen
from svod.bench.suites.suites import ALL_SUITES, SUITES, select_cases
from svod.cli.bench.contestants import svod_contestants
from svod.compile.cpu.host import host_target
from svod.core.ir.dtype import BY_NAME
from svod.errors import ConfigError, UnsupportedError
from svod.tune import at_prepare as search
from svod.tune.session import SessionResult
from tests.draws import a_quarter

EVERY = [c for name in ALL_SUITES for c in SUITES[name]]    # test_whole_models.py has the others
OF_GPU = [*SUITES[GPU], *gpu_cases(small=True)]
# every operation at extents that nothing divides, and 1
SMALL = [
    kinds.matmul("product", "", (17, 9), (9, 5)),
    kinds.matmul("product_1", "", (1, 1), (1, 1)),
    kinds.matmul("vector", "", (17, 9), (9,)),
    kinds.matmul("batch", "", (3, 7, 9), (3, 9, 5)),
    kinds.matmul("half", "", (19, 23), (23, 11), "float16"),
    kinds.matmul("brain", "", (19, 23), (23, 11), "bfloat16"),
    kinds.matmul("bytes", "", (32, 64), (64, 16), "int8"),
    kinds.linear_gelu("linear", "", 7, 9, 5),
    kinds.conv2d("conv", "", 3, 5, 3, 13),
    kinds.conv2d("conv_strided", "", 3, 4, 7, 20, 2),
    kinds.conv2d("conv_point", "", 6, 5, 1, 11),
    kinds.conv2d("conv_depthwise", "", 6, 6, 3, 11, groups=6),
    kinds.softmax("softmax", "", 5, 33),
    kinds.layer_norm("norm", "", 5, 33),
    kinds.attention("attention", "", 3, 13, 8),
    kinds.reduction("sum", "", "sum", (1009,), 0),
    kinds.reduction("rows", "", "sum", (13, 17), 1),
    kinds.reduction("columns", "", "sum", (13, 17), 0),
    kinds.reduction("maximum", "", "max", (1009,), 0),
    kinds.max_pool2d("pool", "", 3, 14),
    kinds.gelu("gelu", "", 1009),
    kinds.axpy("axpy", "", 1009),
    kinds.transpose("transpose", "", 19, 23),
    kinds.rms_norm("rms_norm", "", 5, 33),
    kinds.heads_first("heads_first", "", 7, 3, 5, suite=GPU),
    kinds.cast("cast", "", 19, 23, "float16", suite=GPU),
    kinds.softmax("softmax_half", "", 5, 33, dtype="float16"),
    kinds.layer_norm("norm_half", "", 5, 33, dtype="float16"),
    kinds.rms_norm("rms_norm_half", "", 5, 33, dtype="float16"),
    kinds.attention("attention_half", "", 3, 13, 8, dtype="float16"),
    kinds.attention("attention_brain", "", 3, 13, 8, dtype="bfloat16"),
    kinds.conv2d("conv_half", "", 3, 5, 3, 13, dtype="float16"),
]


def test_names_are_unique_and_plain() -> None:
    names = [c.name for c in (*EVERY, *OF_GPU)]
    assert len(set(names)) == len(names)
    assert all(n.replace("_", "").isalnum() for n in names)


def test_core_has_what_it_is_said_to_have() -> None:
    shapes = {c.name: (c.op, [o.shape for o in c.operands], c.out_shape, c.dtype) for c in SUITES["core"]}
    for n in (256, 512, 1024, 2048):
        assert shapes[f"gemm_{n}"] == ("matmul", [(n, n), (n, n)], (n, n), "float32")
    for dtype in ("float16", "bfloat16", "int8"):
        assert shapes[f"gemm_1024_{dtype}"] == ("matmul", [(1024, 1024)] * 2, (1024, 1024), dtype)
    assert shapes["gemm_bias_gelu"][1:3] == ([(512, 768), (3072, 768), (3072,)], (512, 3072))
    assert shapes["bmm_12"][1:3] == ([(12, 512, 64), (12, 64, 512)], (12, 512, 512))
    assert shapes["gemv_4096"][1:3] == ([(4096, 4096), (4096,)], (4096,))
    assert shapes["conv7x7_s2_224"][1:3] == ([(1, 3, 224, 224), (64, 3, 7, 7)], (1, 64, 112, 112))
    assert shapes["conv_depthwise_112"][1:3] == ([(1, 96, 112, 112), (96, 1, 3, 3)], (1, 96, 112, 112))
    assert shapes["max_pool_64_112"][2] == (1, 64, 56, 56)
    assert len(SUITES["core"]) == 24


def test_work_is_counted_by_hand() -> None:
    by_name = {c.name: c for c in EVERY}
    gemm = by_name["gemm_512"]
    assert (gemm.flops, gemm.bytes_read, gemm.bytes_written) == (2 * 512 ** 3, 2 * 512 * 512 * 4, 512 * 512 * 4)
    assert by_name["gemv_4096"].flops == 2 * 4096 ** 2
    assert by_name["conv3x3_64_56"].flops == 2 * 64 * 64 * 9 * 56 * 56
    assert by_name["conv_depthwise_112"].flops == 2 * 96 * 9 * 112 * 112
    assert by_name["gemm_1024_int8"].bytes_written == 4 * 1024 ** 2 and by_name["gemm_1024_int8"].bytes_read == 2 * 1024 ** 2
    assert by_name["axpy_16m"].bytes_read == 2 * by_name["axpy_16m"].bytes_written == 2 * 4 * (1 << 24)


@pytest.mark.parametrize("case", [c for c in (*EVERY, *OF_GPU) if c.op != "model"], ids=lambda c: c.name)
def test_svod_expression_has_the_declared_shape(case: Case) -> None:
    """Only shapes are compared; nothing is computed, and the operands stay unwritten."""
    operands = [Tensor.empty(*o.shape, dtype=o.dtype) for o in case.operands]
    made = case.build(*operands)
    assert made.shape == case.out_shape and made.dtype == BY_NAME[case.out_dtype]


def test_a_neighbour_is_the_same_operation_of_about_the_same_work() -> None:
    for c in SUITES["odd"]:
        assert c.neighbour is not None and (c.neighbour.op, c.neighbour.dtype, c.neighbour.group) == (c.op, c.dtype, c.group)
        assert 0.6 < c.work / c.neighbour.work < 1.1
    assert all(c.neighbour is None for c in EVERY if c.suite != "odd")


def test_the_suite_gpu_is_the_same_kernels_smaller_where_there_is_none() -> None:
    real, small = SUITES[GPU], gpu_cases(small=True)
    assert [(c.op, c.dtype, c.group, c.suite) for c in real] == [(c.op, c.dtype, c.group, GPU) for c in small]
    assert all(4 * few.work <= much.work for few, much in zip(small, real, strict=True))
    assert {c.dtype for c in real if c.op == "matmul"} == {"float32", "float16", "bfloat16"}
    assert [c.name for c in select_cases(GPU, "*_cast_*")] == ["gpu_cast_8192"]
    assert [c.name for c in select_cases(GPU, "*_cast_*", small=True)] == ["gpu_cast_1024"]
    host = host_target()
    grouped = replace(host, group_threads=256)
    assert (is_gpu(host), is_gpu(grouped), is_gpu(replace(grouped, software_lanes=8))) == (False, True, False)


@pytest.mark.parametrize("seed", [0, 1, 2**32])
def test_random_kernels_are_those_of_the_seed(seed: int) -> None:
    cases = random_cases(30, seed)
    assert [c.name for c in cases] == [c.name for c in random_cases(30, seed)] != [c.name for c in random_cases(30, seed + 1)]
    assert [c.name for c in random_cases(7, seed)] == [c.name for c in cases[:7]]
    assert len({c.name for c in cases}) == 30 and all(c.suite == "random" for c in cases)
    assert sorted((c.op, c.dtype) for c in cases[:24]) == sorted((c.op, c.dtype) for c in SUITES["core"])       # the deck is core
    assert all(LEAST_SECONDS <= nominal_seconds(c) <= MOST_SECONDS for c in cases)
    assert any(is_prime(n) and n > 16 for c in cases for o in c.operands for n in o.shape)
    for c in cases:
        assert c.build(*(Tensor.empty(*o.shape, dtype=o.dtype) for o in c.operands)).shape == c.out_shape


def test_random_kernels_are_the_same_everywhere() -> None:
    """Reports refer to the kernels of seed 0, which must not change with Python or NumPy."""
    assert [c.name for c in random_cases(3, 0)] == ["random_max_pool_379x80", "random_column_sums_3456x6203", "random_depthwise5x5_176x93"]
    with pytest.raises(ConfigError, match="at least"):
        random_cases(0, 0)


def test_operands_are_decided_by_seed_and_name() -> None:
    a, b = kinds.matmul("one", "", (5, 7), (7, 3)), kinds.matmul("two", "", (5, 7), (7, 3))
    first, again, other_seed, other_name = a.draw(3), a.draw(3), a.draw(4), b.draw(3)
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other_seed[0]) and not np.array_equal(first[0], other_name[0])
    for dtype, kind in (("float32", np.float32), ("float16", np.float16), ("bfloat16", np.uint16), ("int8", np.int8)):
        drawn = CaseOperand((33,), dtype, fill="integers" if dtype == "int8" else "normal").draw(np.random.default_rng(0))
        assert drawn.dtype == kind and drawn.ctypes.data % 64 == 0
    positive = CaseOperand((1000,), fill="positive").draw(np.random.default_rng(0))
    assert positive.min() >= 0.5 and positive.max() < 1.5


# -- the reference against formulas written another way ---------------------------------------------

def test_reference_of_gelu_has_an_error_function() -> None:
    case = kinds.gelu("g", "", 501)
    x = np.linspace(-6, 6, 501, dtype=np.float32)
    wanted = [0.5 * float(v) * (1 + math.erf(float(v) / math.sqrt(2))) for v in x]
    assert np.abs(reference(case, [x]) - wanted).max() < 1e-6


def test_reference_of_convolutions_is_the_direct_loop() -> None:
    for case in (c for c in SMALL if c.op == "conv2d"):
        x, w = (a.astype(np.float64) for a in case.draw())
        pad, stride, groups = (case.options[k] for k in ("padding", "stride", "groups"))
        padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        wanted = np.zeros(case.out_shape)
        per = w.shape[0] // groups
        for o in range(w.shape[0]):
            channels = range(o // per * w.shape[1], (o // per + 1) * w.shape[1])
            for i in range(case.out_shape[2]):
                for j in range(case.out_shape[3]):
                    y, z = i * stride, j * stride
                    wanted[0, o, i, j] = (padded[0, channels, y:y + w.shape[2], z:z + w.shape[3]] * w[o]).sum()
        assert largest_error(reference(case, case.draw()), wanted) < 1e-12


def test_reference_of_attention_is_a_loop_over_rows() -> None:
    case = kinds.attention("a", "", 2, 5, 3)
    q, k, v = (a[0].astype(np.float64) for a in case.draw())
    wanted = np.zeros((1, 2, 5, 3))
    for h in range(2):
        for i in range(5):
            weights = np.exp([q[h, i] @ k[h, j] / math.sqrt(3) for j in range(5)])
            wanted[0, h, i] = weights @ v[h] / weights.sum()
    assert largest_error(reference(case, case.draw()), wanted) < 1e-12


def test_largest_error() -> None:
    assert largest_error(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 0.5
    assert largest_error(np.array([1.0]), np.array([1.0, 4.0])) == math.inf
    assert largest_error(np.array([math.nan]), np.array([1.0])) == math.inf
    assert largest_error(np.zeros(3), np.zeros(3)) == 0.0 and largest_error(np.ones(3), np.zeros(3)) == 1.0
    assert largest_error(np.zeros(0), np.zeros(0)) == 0.0


# -- everyone computes the same ---------------------------------------------------------------------

INSTALLED = [name for name, library in PEER_LIBRARIES.items() if all(find_spec(m) is not None for m in library.needs)]
CONTESTANTS: list[Any] = [*svod_contestants("heuristic", None), *load_peers(INSTALLED, 1)[0]]
KNOWN_GAPS = {("numpy", "brain"): "bfloat16", ("numpy", "gelu"): "erf", ("numpy", "linear"): "erf",
              ("onnxruntime", "brain"): "NOT_IMPLEMENTED", ("numpy", "attention_brain"): "bfloat16",
              ("onnxruntime", "attention_brain"): "Type Error"}


@pytest.mark.parametrize("peer", CONTESTANTS, ids=lambda p: p.name)
@pytest.mark.parametrize("case", a_quarter(SMALL), ids=lambda c: c.name)
def test_contestants_agree_with_the_reference(peer: Peer, case: Case) -> None:
    operands = case.draw(1)
    kept = [a.copy() for a in operands]
    gap = KNOWN_GAPS.get((peer.name, case.name))
    if gap is not None:
        with pytest.raises(UnsupportedError, match=gap):
            peer.prepare(case, operands)
        return
    prepared = peer.prepare(case, operands)
    prepared.run(2)
    assert largest_error(widen(prepared.output(), case.out_dtype), reference(case, operands)) <= case.tolerance
    assert all(np.array_equal(a, b) for a, b in zip(operands, kept, strict=True)), "the operands were changed"


def test_kernels_of_svod_come_from_their_case() -> None:
    heuristic = CONTESTANTS[0]
    small = next(c for c in SMALL if c.name == "linear")
    assert {k.origin for k in heuristic.prepare(small, small.draw()).kernels} == {"linear"}
    mlp = next(c for c in SUITES["models"] if c.name == "mlp")
    assert "mlp" not in {k.origin.split(".")[0] for k in heuristic.prepare(mlp, mlp.draw()).kernels}, "a model has layers of its own"


def test_all_operations_have_a_reference() -> None:
    assert {c.op for c in (*EVERY, *OF_GPU)} == set(REFERENCES) and {c.op for c in SMALL} == set(REFERENCES) - {"model"}


def test_models_are_computed_by_every_installed_library() -> None:
    case = next(c for c in SUITES["models"] if c.name == "mlp")
    operands = case.draw()
    wanted = reference(case, operands)
    for peer in CONTESTANTS:
        if peer.name != "numpy":
            prepared = peer.prepare(case, operands)
            prepared.run(1)
            assert largest_error(widen(prepared.output(), "float32"), wanted) <= case.tolerance, peer.name


def test_models_need_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(kinds, "MODELS_DIR", tmp_path)
    monkeypatch.setattr(kinds, "_models", {})
    with pytest.raises(UnsupportedError, match="from a checkout"):
        kinds.load_model("resnet18", "ResNet18")


# -- choosing ---------------------------------------------------------------------------------------

def test_select_cases() -> None:
    assert [c.name for c in select_cases("core", "gemm_2*")] == ["gemm_256", "gemm_2048"]
    assert [c.name for c in select_cases("core", "softmax*, gemm_256")] == ["gemm_256", "softmax_4096x1024"]
    assert len(select_cases("all")) == len(EVERY) == len(select_cases("core,all, odd"))
    assert [c.name for c in select_cases("odd,core", "gemm_1000,gemm_256")] == ["gemm_1000", "gemm_256"]
    both = select_cases("random,models", count=3, seed=5)
    assert [c.suite for c in both] == ["random"] * 3 + ["models"] * len(SUITES["models"])
    assert [c.name for c in both[:3]] == [c.name for c in select_cases("random", count=3, seed=5)] != [
        c.name for c in select_cases("random", count=3, seed=6)]


@pytest.mark.parametrize(("suite", "pattern", "words"), [
    ("cores", "*", ["'cores'", "core, odd, models"]),
    ("core", "gem", ["'gem'", "gemm_256", "transpose_4096"]),
    ("core", "resnet18", ["--suite models"]),
    ("core", " , ", ["no kernel was asked for"]),
    (" , ", "*", ["no suite in", "core, odd, models, random"]),
])
def test_what_is_unknown_is_answered_with_what_exists(suite: str, pattern: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        select_cases(suite, pattern)
    assert all(w in str(caught.value) for w in words)


def test_parse_peers() -> None:
    assert parse_peers("numpy, torch,numpy") == ["numpy", "torch"]
    assert parse_peers("all") == list(PEER_LIBRARIES) and parse_peers("none") == parse_peers("") == []
    with pytest.raises(ConfigError, match=r"'tvm'.*numpy, torch, onnxruntime, jax"):
        parse_peers("numpy,tvm")


def test_a_missing_library_is_left_out_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEER_LIBRARIES, "torch", PEER_LIBRARIES["torch"]._replace(needs=("no_such_module",)))
    monkeypatch.setitem(PEER_LIBRARIES, "jax", PEER_LIBRARIES["jax"]._replace(needs=("numpy",), module="svod.no_such_module"))
    peers, infos = load_peers(["torch", "numpy", "jax"], 1)
    assert [p.name for p in peers] == ["numpy"]
    assert [i.missing for i in infos][:2] == ["no_such_module is not installed", None]
    assert (infos[2].missing or "").startswith("it cannot be imported")
    assert infos[1].version == np.__version__ and infos[0].version is None


def test_each_case_has_a_search_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM_KERNEL_BUDGET", "7")
    heuristic, tuned = svod_contestants("beam", 3, fresh=True, db=":none:")
    assert heuristic.config.beam is None and heuristic.config.db == ":none:"
    beam = tuned.config.beam
    assert beam is not None and (beam.width, beam.ignore_cache) == (3, True)
    # the configuration's budget is per process, and earlier searches have used a part of it
    budgets = [tuned._config_for(c).beam for c in (kinds.gelu("a", "", 7), SUITES["models"][0])]
    assert [b.budget for b in budgets if b is not None] == [7.0, 600.0] and heuristic._config_for(SUITES["core"][0]).beam is None
    assert svod_contestants("db-only", None)[1].config.beam is None and len(svod_contestants("heuristic", None)) == 1


def test_freed_memory_is_kept_once_asked() -> None:
    """An array of 64 MB that is allocated again causes no page faults."""
    script = """
import resource
import numpy as np
from svod.bench.peers import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(64 << 20, np.uint8)[::4096] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert faults() > 10 and faults() > 10
keep_freed_memory()
faults()
assert faults() < 10
"""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc can be told")
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("when", ["while it starts", "in the search"])
def test_ctrl_c_in_a_search_is_one_of_the_benchmarks(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is interrupted keeps its results and continues with the next case; the message does not advise to interrupt each."""
    class Interrupted:
        def __init__(self, tasks: Any, *args: Any, **kwargs: Any) -> None:
            if when == "while it starts":
                raise KeyboardInterrupt

        def run(self) -> SessionResult:
            return SessionResult(interrupted=True)
    monkeypatch.setattr(search, "TuneSession", Interrupted)
    monkeypatch.setattr(search, "cached_ceilings", lambda *args, **kwargs: None)
    monkeypatch.setenv("BEAM_EXECUTOR", "inline")
    tuned = svod_contestants("beam", 1, fresh=True, db=":none:")[1]
    case = select_cases("odd", "sum_1000003")[0]
    with pytest.raises(KeyboardInterrupt):
        tuned.prepare(case, case.draw())
