"""`torch.compile(model, backend="svod")` and `svod.torch.compile`: weights, in-place updates, sizes, layouts, and operations left to
PyTorch."""
from __future__ import annotations

import copy
import logging
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch  # noqa: E402
from svod.errors import ArgumentError, ConfigError, DeviceError, ShapeError, SharedMemoryError, StateError, UnsupportedError  # noqa: E402
from svod.torch import backend  # noqa: E402
from svod.torch.functions import functions  # noqa: E402
from svod.torch.kept import WrittenArguments  # noqa: E402
from svod.torch.settings import Settings  # noqa: E402
from svod.torch.weights import Weights  # noqa: E402
from tests.draws import a_quarter  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.linear = torch.nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3))).softmax(-1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def function_of(name: str) -> Any:
    graphs = [g for g in svod.torch.report().graphs if g.name.startswith(name)]
    return graphs[-1].function


def test_pytorch_finds_the_backend(caplog: pytest.LogCaptureFixture) -> None:
    assert "svod" in torch._dynamo.list_backends()
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(torch.compile(model, backend="svod", options={"strict": True})(x), model(x))
    assert not warnings_of(caplog)


def test_weights_are_packed_once_and_again_after_they_change() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    run = torch.compile(model, backend="svod")
    run(x)
    function = function_of("forward")
    (weights,) = function.weights.values()
    run(x)
    assert list(function.weights.values()) == [weights] and len(function.static) == 8
    for change in (lambda: model.linear.weight.mul_(3), lambda: model.load_state_dict(Net().state_dict()),
                   lambda: setattr(model.conv.weight, "data", torch.randn(8, 3, 3, 3))):
        change()
        torch.testing.assert_close(run(x), model(x))
    assert function.changes == 3


def test_weights_are_those_of_the_same_tensors_alone() -> None:
    """Another tensor over the same memory has the same address and version, but is not the same weight."""
    first = torch.randn(5, 3)
    weights = Weights([first], WrittenArguments([], bound=False))
    assert weights.is_of([first]) and not weights.is_of([first.detach()]) and not weights.is_of([]) and weights.is_unchanged()


def test_modules_that_share_code_have_weights_of_their_own() -> None:
    models = [Net().eval() for _ in range(3)]
    runs = [torch.compile(m, backend="svod") for m in models]
    x = torch.randn(1, 3, 8, 8)
    for _ in range(2):
        for m, run in zip(models, runs, strict=True):
            torch.testing.assert_close(run(x), m(x))


def test_buffers_and_inputs_are_updated_in_place() -> None:
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(4, 3))

        def forward(self, x: Any, other: Any, at: Any) -> Any:
            self.kept.index_copy_(0, at, x)
            other.add_(1)
            return self.kept.sum(0) + other

    for compiled in (lambda m, *a: torch.compile(m, backend="svod"), svod.torch.compile):
        torch._dynamo.reset()
        model, expected = Cache(), Cache()
        x, at = torch.randn(1, 3), torch.tensor([0])
        run = compiled(model, x, torch.zeros(3), at)
        memory = model.kept.data_ptr()
        mine, theirs = torch.zeros(3), torch.zeros(3)
        for i in range(4):
            x, at = torch.randn(1, 3), torch.tensor([i])
            torch.testing.assert_close(run(x, mine, at), expected(x, theirs, at))
            torch.testing.assert_close(model.kept, expected.kept)
            torch.testing.assert_close(mine, theirs)
        assert model.kept.data_ptr() == memory


def test_an_input_with_gaps_is_updated() -> None:
    run = torch.compile(lambda x: x.mul_(2).sum(), backend="svod")
    mine, theirs = torch.ones(4, 6), torch.ones(4, 6)
    torch.testing.assert_close(run(mine[:, ::2]), theirs[:, ::2].mul_(2).sum())
    torch.testing.assert_close(mine, theirs)


def test_sizes_that_vary_have_one_plan_and_dynamo_compiles_twice() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    torch._dynamo.utils.counters.clear()
    before = set(functions)
    run = torch.compile(model, backend="svod")
    for n in range(2, 14):
        x = torch.randn(n, 4)
        torch.testing.assert_close(run(x), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert [len(g.function.plans) for g in svod.torch.report().graphs if g.calls > 1 and g.function not in before] == [1]


def test_channels_last_in_and_out_without_copies() -> None:
    model = torch.nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    run = torch.compile(model, backend="svod")
    result = run(x)
    torch.testing.assert_close(result, model(x))
    assert result.stride() == model(x).stride() and result.is_contiguous(memory_format=torch.channels_last)
    (plan,) = [p for f in functions if f.calls == 1 for p in f.plans if len(p.sources[0].order or ()) == 4]
    assert [s.order for s in plan.sources] == [(0, 2, 3, 1)]


RESIZED = {
    "a size": (lambda x: torch.nn.functional.interpolate(x, (9, 23), mode="bilinear"), (2, 3, 5, 7)),
    "a factor": (lambda x: torch.nn.functional.interpolate(x, scale_factor=2.3, mode="bilinear"), (2, 3, 5, 7)),
    "factors": (lambda x: torch.nn.functional.interpolate(x, scale_factor=(2, 1.5), mode="bicubic", align_corners=True), (1, 3, 5, 7)),
    "one position": (lambda x: torch.nn.functional.interpolate(x, 7, mode="linear"), (1, 3, 1)),
    "a module": (torch.nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 3, 4, 5)),
    "a computed size": (lambda x: torch.nn.functional.interpolate(x, (x.shape[2] * 2, x.shape[3] + 1), mode="bilinear"), (1, 2, 6, 5)),
    "a factor of the size": (lambda x: torch.nn.functional.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
                             (1, 2, 6, 5)),
}


@pytest.mark.parametrize(("name", "dynamic"), a_quarter(product(RESIZED, (False, True))))
def test_images_are_resized_whole(name: str, dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch would take them apart into gathers of neighbours; other sizes than those that were traced, too."""
    function, shape = RESIZED[name]
    before = set(functions)
    compiled = torch.compile(function, backend="svod", dynamic=dynamic, options={"strict": True})
    for more in (0, 1) if dynamic else (0,):
        x = torch.randn([n + more if n > 1 else n for n in shape])
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-5, atol=1e-5)
    assert not warnings_of(caplog)
    if name != "a factor of the size":
        new = [f for f in functions if f not in before]
        assert "svod.interpolate.default" in {str(node.target) for node in new[-1].program.graph.nodes}


def test_outputs_have_the_strides_of_pytorch() -> None:
    def function(x: Any) -> Any:
        y = x * 2
        return y.t(), y.expand(3, 2, 4), (y + 1).t().contiguous(), y
    x = torch.randn(2, 4)
    for got, wanted in zip(torch.compile(function, backend="svod")(x), function(x), strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()


def test_what_svod_has_not_runs_in_pytorch_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Any) -> Any:
        return torch.special.bessel_j0(x * 2) + torch.fft.fft(x).abs()
    x = torch.rand(3, 1031)         # a prime number of positions, for which there are no products
    run = torch.compile(function, backend="svod")
    for _ in range(3):
        torch.testing.assert_close(run(x), function(x))
    (said,) = warnings_of(caplog)
    assert "bessel_j0" in said and "_fft_" in said and "% of the time" in said and "test_backend.py:" in said
    with pytest.raises(UnsupportedError, match="bessel_j0"):
        svod.torch.compile(_Module(function), x, options={"strict": True})(x)


@pytest.mark.parametrize("function", [
    lambda x: torch.fft.rfft(x).abs(),
    lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, 30),
    lambda x: torch.view_as_real(torch.fft.ifft(torch.fft.fft(x, norm="ortho"), norm="forward")),
    lambda x: torch.fft.irfft2(torch.fft.rfft2(x.reshape(7, 5, 6)), s=(5, 6), norm="ortho"),
    lambda x: torch.fft.fft2(x.reshape(7, 5, 6)).transpose(0, 1).abs(),
    lambda x: torch.stft(x, 16, 5, window=torch.hann_window(16), return_complex=True).abs(),
    lambda x: torch.istft(torch.stft(x, 8, window=torch.hann_window(8), return_complex=True), 8, window=torch.hann_window(8)),
    lambda x: (torch.fft.fft(x) - 2j).conj().imag + (1 + torch.fft.fft(x)).real,
    lambda x: torch.fft.fft(x * 1e30).abs(),
    lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(7, 15, 2)) * torch.polar(torch.ones(15), torch.arange(15.0))).flatten(1),
], ids=["rfft", "irfft", "fft", "rfft2", "fft2", "stft", "istft", "sums", "large", "rotation"])
def test_complex_numbers_are_pairs(function: Any) -> None:
    x = torch.randn(7, 30)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="svod")(x), function(x), rtol=1e-4, atol=1e-5)


_MIXED = {
    "quotients": lambda z, w, r, n: (z / r, z / n, z / 2, z / 2.5, r / z, z / w, 3 / z, z / (1 - 2j), z / r[:1], z[:1] / r, z.reciprocal()),
    "products": lambda z, w, r, n: (z * r, r * z, z * n, z * 2, 2.5 * z, z * (r > 2), r * 1j, n * (2 + 1j), z[:1] * r, z * r.double()),
    "sums": lambda z, w, r, n: (z + r, r + z, z + n, z + 2, r + 1j, z + (r > 2), z[:1] + r, r[:1] + z, torch.add(z, r, alpha=2),
                                torch.add(r, z, alpha=3), torch.add(z, w, alpha=1 + 2j), torch.add(z, r, alpha=2j)),
    "differences": lambda z, w, r, n: (z - r, r - z, 2 - z, 1j - r, 1j - z, z[:1] - r, torch.rsub(z, r), torch.rsub(z, 2, alpha=3)),
    "powers": lambda z, w, r, n: (z ** 0, z ** 1, z ** 2, z ** 3, z ** 7.0, z ** -1, z ** -2, z.square())}


@pytest.mark.parametrize("name", _MIXED)
@pytest.mark.parametrize("shape", [(3, 5), (1, 37)])
def test_complex_and_real_numbers_are_mixed(name: str, shape: tuple[int, int]) -> None:
    def function(x: Any, y: Any, r: Any, n: Any) -> Any:
        return [torch.view_as_real(made) for made in _MIXED[name](torch.view_as_complex(x), torch.view_as_complex(y), r, n)]
    given = torch.randn(*shape, 2), torch.randn(*shape, 2), torch.rand(*shape) + 1.5, torch.arange(1, shape[1] + 1)
    got = torch.compile(function, backend="svod", options={"strict": True})(*given)
    for a, b in zip(got, function(*given), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and is_near(a, b).all()


def is_near(pairs: Any, wanted: Any) -> Any:
    """Whether each complex number, given as a pair, differs from the wanted one by at most 1e-5 of its magnitude."""
    apart, size = (torch.view_as_complex(v.double()).abs() for v in (pairs - wanted, wanted))
    return apart <= 1e-5 * size


def test_quotients_of_complex_numbers_at_the_ends_of_the_range() -> None:
    def function(x: Any, y: Any) -> Any:
        return torch.view_as_real(torch.view_as_complex(x) / torch.view_as_complex(y))
    ends = torch.tensor([0.0, 1e-30, 1.0, 3e30])
    pairs = torch.cartesian_prod(ends, ends)
    x, y = pairs.repeat(16, 1), pairs.repeat_interleave(16, 0)
    x = x * (y.abs().amax(1, keepdim=True) / 3e30).clamp(min=1e-8)      # no quotient is beyond the range
    got, wanted = torch.compile(function, backend="svod", options={"strict": True})(x, y), function(x, y)
    assert torch.equal(got.isfinite(), wanted.isfinite())
    assert is_near(got, wanted)[wanted.isfinite().all(1)].all()


def test_a_spectrogram_runs_in_svod_alone(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Any) -> Any:
        return torch.stft(x, 16, window=torch.hann_window(16), return_complex=True).abs().square().log1p()
    run, x = svod.torch.compile(_Module(function), torch.randn(2, 97), options={"strict": True}), torch.randn(2, 97)
    torch.testing.assert_close(run(x), function(x), rtol=1e-4, atol=1e-5)
    assert not warnings_of(caplog)


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_random_numbers_are_pytorchs() -> None:
    def function(x: Any) -> Any:
        return x + torch.rand(4), torch.rand(4)
    run = torch.compile(function, backend="svod")
    x = torch.zeros(4)
    run(x)
    torch.manual_seed(3)
    first = run(x)
    torch.manual_seed(3)
    again = run(x)
    torch.testing.assert_close(first, again)
    assert not torch.equal(first[0], first[1]) and not torch.equal(run(x)[0], first[0])


def test_bfloat16_goes_through_pytorch_unharmed() -> None:
    def function(x: Any) -> Any:
        return torch.special.bessel_j0(x.float()).bfloat16() + torch.cummin(x, 0)[0].digamma()
    x = torch.rand(8).bfloat16() + 1
    torch.testing.assert_close(torch.compile(function, backend="svod")(x), function(x))


@pytest.mark.parametrize(("make", "why"), [
    (lambda: torch.randn(3, requires_grad=True), "gradients"),
    (lambda: torch.randn(3, dtype=torch.complex64), "complex64"),
], ids=["gradients", "complex"])
def test_what_svod_cannot_take_runs_in_pytorch(make: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.enable_grad():
        x = make()
        result = torch.compile(lambda x: x * 3, backend="svod")(x)
    assert torch.equal(result, x * 3)
    assert any(why in said for said in warnings_of(caplog))


def test_sparse_tensors_stay_in_pytorch() -> None:
    x = torch.eye(3).to_sparse()
    assert torch.equal(torch.compile(lambda x: x * 3, backend="svod")(x).to_dense(), torch.eye(3) * 3)


def test_arguments_that_share_memory() -> None:
    def function(a: Any, b: Any) -> Any:
        a.add_(1)
        return a * b
    run = torch.compile(function, backend="svod")
    run(torch.ones(6), torch.ones(6))
    mine, theirs = torch.arange(8.0), torch.arange(8.0)
    torch.testing.assert_close(run(mine[:6], mine[2:]), function(theirs[:6], theirs[2:]))
    torch.testing.assert_close(mine, theirs)


def test_options() -> None:
    settings = Settings.of("max-autotune", {"budget": 5.0, "threads": 1, "strict": True})
    assert settings.config is not None and settings.config.beam is not None
    assert settings.config.beam.budget == 5.0 and settings.config.threads == 1 and settings.strict
    assert Settings.of().config is None
    with pytest.raises(Exception, match=r"(?s)beem.*strict.*budget.*threads"):
        torch.compile(lambda x: x + 1, backend="svod", options={"beem": 3})(torch.ones(2))


def test_exported_modules_check_their_arguments() -> None:
    model = Net().eval()
    run = svod.torch.compile(model, torch.randn(2, 3, 8, 8))
    with pytest.raises(ShapeError, match=r"expected torch.float32 \(2, 3, 8, 8\), got torch.float64 \(2, 3, 8, 9\)"):
        run(torch.randn(2, 3, 8, 9).double())
    with pytest.raises(ArgumentError, match="compiled for the arguments"):
        run(torch.randn(2, 3, 8, 8), 3)
    with pytest.raises(ArgumentError, match="takes a torch"):
        svod.torch.compile(lambda x: x, torch.ones(1))
    model.linear.weight.zero_()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(run(x), model(x))


def test_exported_modules_with_sizes_that_vary() -> None:
    model = Net().eval()
    batch = torch.export.Dim("batch", min=1, max=16)
    run = svod.torch.compile(model, torch.randn(2, 3, 8, 8), dynamic_shapes=({0: batch},))
    for n in (3, 2, 5):
        x = torch.randn(n, 3, 8, 8)
        torch.testing.assert_close(run(x), model(x))
    assert len(run.plans) == 1


def test_data_dependent_control_flow_is_an_error_that_says_so() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if x.sum() > 0 else x
    with pytest.raises(UnsupportedError, match="cannot be exported"):
        svod.torch.compile(Branch(), torch.ones(3))
    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(Branch(), backend="svod")(x), x * 2)


def test_report() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    run = svod.torch.compile(model, x)
    run(x)
    (graph,) = [g for g in svod.torch.report().graphs if g.function is run.function]
    assert graph.is_whole and graph.kernels >= 1 and graph.calls == 1 and graph.weights >= 6 and "Net" in str(svod.torch.report())


def test_an_operation_that_leaves_out_a_result_that_it_declares() -> None:
    def function(x: Any, *weights: Any) -> Any:
        state = torch.zeros(1, x.shape[1], 5)
        made = torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, False, [], 2, 5, 1, True, False, False, False)
        assert made[3] is None or made[3].numel() == 0, "the workspace of a backward pass, which inference does not need"
        return [t * 2 for t in made[:3]]
    x, weights = torch.randn(3, 2, 4), [t.detach() for t in torch.nn.LSTM(4, 5).parameters()]
    for got, wanted in zip(svod.torch.compile(_Module(function), x, *weights)(x, *weights), function(x, *weights), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_pytorchs_own_encoder_layers(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options).eval()
    run = torch.compile(model, backend="svod")
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for kwargs in ({}, {"src_key_padding_mask": padding}, {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}):
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(run(x, **kwargs), model(x, **kwargs), rtol=1e-4, atol=1e-5)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_sequences_and_rows_that_are_masked_altogether_are_nan_in_encoder_layers(options: dict[str, Any]) -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options).eval()
    run, x = torch.compile(model, backend="svod"), torch.randn(2, 5, 8)
    rows = torch.zeros(5, 5, dtype=torch.bool)
    rows[3] = True
    for kwargs in ({"src_key_padding_mask": torch.tensor([[False] * 5, [True] * 5])}, {"src_mask": rows},
                   {"src_mask": torch.zeros(5, 5).masked_fill(rows, -torch.inf)}):
        wanted = model(x, **kwargs)
        assert wanted.isnan().any() and wanted.isfinite().any()
        torch.testing.assert_close(run(x, **kwargs), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_attention_that_are_masked_altogether_are_zeros(dtype: Any) -> None:
    """Rows of attention that are completely masked are zeros, as in PyTorch, although its softmax alone gives NaN."""
    q = torch.randn(1, 2, 3, 4, dtype=dtype)
    keep = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
    added = torch.zeros(3, 3, dtype=dtype).masked_fill(~keep, -torch.inf)
    for mask in (keep, added, keep[None, None, :, :1]):
        def attend(q: Any, mask: Any = mask) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
        wanted = attend(q)
        assert wanted[..., 2, :].eq(0).all()
        torch.testing.assert_close(svod.torch.compile(_Module(attend), q)(q), wanted)
    got = svod.torch.compile(_Module(lambda q: (q @ q.mT + added).softmax(-1)), q)(q)
    torch.testing.assert_close(got, (q @ q.mT + added).softmax(-1), equal_nan=True)


def test_self_attention_in_evaluation_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    got, _ = torch.compile(lambda x: model(x, x, x, need_weights=False), backend="svod")(x)
    torch.testing.assert_close(got, model(x, x, x, need_weights=False)[0], rtol=1e-4, atol=1e-5)
    assert not warnings_of(caplog)


def test_as_strided_reads_the_storage() -> None:
    def function(x: Any) -> Any:
        return x.as_strided((2, 2), (1, 2), 1) * 2
    x = torch.arange(12.0).reshape(3, 4)
    for view in (x, x.t(), x[1:]):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend="svod")(view), function(view))
        torch.testing.assert_close(svod.torch.compile(_Module(function), view)(view), function(view))


def test_sparse_arguments_cannot_be_exported() -> None:
    with pytest.raises(UnsupportedError, match="cannot be exported"):
        svod.torch.compile(_Module(lambda x: x.to_dense()), torch.eye(3).to_sparse_csr())


@pytest.mark.parametrize("change", [
    lambda w: w.data.add_(1), lambda w: w.data.copy_(torch.randn(32, 16)), lambda w: w.detach().numpy().__imul__(2),
    lambda w: w.data.mul_(torch.randn(32, 16) > 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_of_weights_that_pytorch_does_not_count_are_seen(change: Any, dtype: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(dtype)
    x = torch.randn(3, 16, dtype=dtype)
    runs = [torch.compile(model, backend="svod"), svod.torch.compile(model, x)]
    for _ in range(2):
        for run in runs:
            torch.testing.assert_close(run(x), model(x))
        version = model[0].weight._version
        change(model[0].weight)
        assert model[0].weight._version == version


def test_weights_made_in_inference_mode_may_change() -> None:
    with torch.inference_mode():
        model, x = torch.nn.Linear(16, 8), torch.randn(3, 16)
        run = torch.compile(model, backend="svod")
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
            model.weight.mul_(2)


def _set_data(t: Any) -> None:
    t.data = t.data.clone()


def test_threads_that_call_first_get_right_results() -> None:
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)).eval()
    x = torch.randn(5, 16)
    f, barrier = torch.compile(m, backend="svod"), threading.Barrier(4)

    def serve(_: int) -> float:
        barrier.wait()
        with torch.inference_mode():
            return max(float((f(x) - expected).abs().max()) for _ in range(50))
    with torch.inference_mode():
        expected = m(x)
    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(serve, range(4))) < 1e-5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step", [1, 2], ids=["dense", "gaps"])
def test_arguments_that_are_written_and_share_memory_now_and_then(seed: int, step: int) -> None:
    """Views of one storage are arguments, two of which are written: the result is PyTorch's, or an error."""
    rng = random.Random(seed)
    run = svod.torch.compile(_Module(_written), *(torch.ones(9)[::step][:4] for _ in range(3)))
    storage, same = torch.randn(60), torch.empty(60)
    refused = 0
    for call in range(20):
        same[:] = storage
        if call % 4 != 3:       # else the same tensors again
            places = [rng.randrange(51) for _ in range(3)]
            given, expected = ([m[p:p + 9:step][:4] for p in places] for m in (storage, same))
        read, first, last = ([*range(p, p + 9, step)][:4] for p in (places[1], places[0], places[2]))
        if {*first} & {*read, *last} or {*last} & {*read}:
            refused += 1
            with pytest.raises(SharedMemoryError, match="share"):
                run(*given)
        else:
            torch.testing.assert_close(run(*given), _written(*expected))
        torch.testing.assert_close(storage, same)
    assert 0 < refused < 20


@pytest.mark.parametrize("change", [lambda t: t.data.neg_(), _set_data, lambda t: t.set_(torch.randn(4)), lambda t: t.resize_(4)],
                         ids=["values", "data", "set", "resize"])
def test_arguments_that_are_the_same_tensor_with_other_memory(change: Any) -> None:
    run, x, y = svod.torch.compile(_Module(lambda x, y: x.add_(y)), torch.ones(4), torch.ones(4)), torch.randn(4), torch.randn(4)
    for _ in range(3):
        expected = x + y
        torch.testing.assert_close(run(x, y), expected)
        torch.testing.assert_close(x, expected)
        change(x), change(y)


def test_arguments_of_two_storages_over_one_memory() -> None:
    run = svod.torch.compile(_Module(_written), *(torch.ones(9)[::2][:4] for _ in range(3)))
    memory = np.arange(40.0, dtype=np.float32)
    first, second, apart = (torch.from_numpy(memory[i:i + 10:2])[:4] for i in (0, 2, 1))
    with pytest.raises(SharedMemoryError, match="share"):
        run(first, torch.ones(9)[::2][:4], second)
    expected = [t.clone() for t in (first, apart)]
    torch.testing.assert_close(run(first, torch.ones(9)[::2][:4], apart), _written(expected[0], torch.ones(4), expected[1]))


def test_modules_that_register_in_code_that_dynamo_compiles() -> None:
    """The registration hooks cause no guards."""
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.n = self.n + x
            return self.n * 2
    svod.torch.compile(torch.nn.Linear(2, 2), torch.ones(1, 2))
    graphs = []
    run = torch.compile(Counts(), backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for i in range(4):
        assert float(run(torch.ones(()))) == 2 * (i + 1)
    assert len(graphs) == 1


def _written(a: Any, b: Any, c: Any) -> Any:
    a.add_(b * 0.5)
    c.mul_(0.75)
    return a - c


def test_the_plan_that_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("svod.torch.functions.MOST_PLANS", 2)
    run = torch.compile(lambda x: torch.nn.functional.interpolate(x, scale_factor=2, mode="linear"), backend="svod", dynamic=True)
    for n in (2, 3, 2, 4, 2, 5, 2):
        run(torch.ones(1, 1, n))
    assert {p.results[0].dtype for p in function_of("<lambda>").plans} == {torch.float32} and len(function_of("<lambda>").plans) == 2
    assert function_of("<lambda>").prepared == 4        # 2, 3, 4 and 5: the plan of 2 was kept
    assert sum("used longest ago" in w for w in warnings_of(caplog)) == 1


@pytest.mark.parametrize(("options", "text"), [
    ({"beem": 8}, r"no option is called 'beem' \(is it beam\?\); there are beam, strict, freeze"), ({"strict": "no"}, "give True or False"),
    ({"beam": -1}, "an integer, at least 0"), ({"device": "TPU"}, "there is no device 'TPU'"), ({"device": "WEBGPU:99"}, "WEBGPU"),
    ({"device": "CUDA:sm_90"}, "sm_90")])
def test_errors_of_svod_reach_the_user_as_they_are(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError, DeviceError), match=text) as e:
        torch.compile(torch.nn.Linear(4, 4), backend="svod", options=options)(torch.ones(4))
    assert not isinstance(e.value, torch._dynamo.exc.BackendCompilerFailed)
    with pytest.raises((ConfigError, UnsupportedError, DeviceError), match=text):
        svod.torch.compile(torch.nn.Linear(4, 4), torch.ones(4), options=options)


def test_a_graph_that_needs_gradients_is_an_error_under_strict() -> None:
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="Linear: it needs gradients"):
        torch.compile(torch.nn.Linear(4, 4), backend="svod", options={"strict": True})(torch.ones(4))


@pytest.mark.parametrize(("function", "why"), [
    (lambda x: torch.dequantize(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), "makes quantised tensors"),
    (lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), "control flow at test_backend.py")])
def test_graphs_that_pytorch_runs_say_why(function: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(function, backend="svod")(x), function(x))
    assert why in warnings_of(caplog)[-1]


def test_numbers_that_are_equal_and_of_another_type_are_refused_in_every_call() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            return x * n if isinstance(n, int) else x - n
    x = torch.randn(3, 5, requires_grad=True)
    with torch.no_grad():
        run = svod.torch.compile(Scaled().eval(), x, 1)
        for _ in range(2):
            torch.testing.assert_close(run(x, 1), x.detach())
            for n in (2, True):
                with pytest.raises(ShapeError, match=f"argument 1: .* was compiled in, got {n}"):
                    run(x, n)
            with pytest.raises(ShapeError, match=r"expected torch\.float32"):
                run(x.double(), 1)
            with pytest.raises(ShapeError, match="got ndarray"):
                run(x.detach().numpy(), 1)


def test_exported_modules_take_strided_tensors_on_the_cpu() -> None:
    run = svod.torch.compile(torch.nn.Linear(4, 4), torch.ones(4, 4))
    for x, text in ((torch.ones(4, 4, device="meta"), "strided tensor on meta"), (torch.eye(4).to_sparse(), "sparse_coo tensor on cpu")):
        with pytest.raises(ShapeError, match=text):
            run(x)
    with pytest.raises(ArgumentError, match=r"compiled for the arguments \(Tensor\), and is called with \(Tensor, scale=3\)"):
        run(torch.ones(4, 4), scale=3)


def test_compiling_says_nothing_of_flags_of_pytorchs(recwarn: pytest.WarningsRecorder) -> None:
    before = torch._C._get_mkldnn_enabled()
    torch.compile(torch.nn.Linear(3, 2).eval(), backend="svod")(torch.ones(2, 3))
    assert not [w for w in recwarn if "oneDNN" in str(w.message)] and torch._C._get_mkldnn_enabled() == before


def test_each_model_that_needs_gradients_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A second model of the same class gets its own warning, although Dynamo has one graph for both."""
    torch._dynamo.utils.counters.clear()        # graph breaks of other tests, which `_said` would forget
    monkeypatch.setattr(backend, "_said", set())
    with torch.enable_grad():
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
            run = torch.compile(model, backend="svod")
            for n in (4, 4, 5):
                torch.testing.assert_close(run(torch.ones(n, 3)), model(torch.ones(n, 3)))
        assert ["it needs gradients" in said for said in warnings_of(caplog)] == [True, True]


def test_code_that_dynamo_leaves_out_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(backend, "_said", set())

    def broken(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1
    run = torch.compile(broken, backend="svod")
    for n in (4, 3):
        torch.testing.assert_close(run(torch.ones(n)), broken(torch.ones(n)))
    (said,) = warnings_of(caplog)
    assert "Dynamo breaks the graph" in said and "graph_break()" in said and "TORCH_LOGS" in said
    (reason,) = svod.torch.report().breaks
    assert reason in said and reason in str(svod.torch.report())
    torch._dynamo.utils.counters.clear()        # for the warnings of other tests


def _inverted(x: Any) -> Any:
    return torch.linalg.cholesky(torch.linalg.inv(x) @ x.mT @ x).softmax(-1)


class Inverted(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return _inverted(x)


@pytest.mark.parametrize("make", [lambda x: torch.compile(_inverted, backend="svod"), lambda x: svod.torch.compile(Inverted(), x)])
def test_operations_that_raise_are_run_by_pytorch_inside_the_plan(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    a = torch.rand(2, 5, 5)
    x = a @ a.mT + torch.eye(5)
    run = make(x)
    torch.testing.assert_close(run(x), _inverted(x), rtol=1e-4, atol=1e-5)
    (said,) = warnings_of(caplog)
    assert "aten._linalg_check_errors" in said and "as it is" not in said
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        run(torch.zeros(2, 5, 5))
    torch.testing.assert_close(run(x), _inverted(x), rtol=1e-4, atol=1e-5)


def test_an_exported_module_says_what_it_needs() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 2)).eval(), torch.ones(2, 3)
    for given, named in (((), {}), ((x,), {"beam": 8})):
        with pytest.raises(ArgumentError, match=r"Sequential.forward does, .*options="):
            svod.torch.compile(model, *given, **named)
    with pytest.raises(ConfigError, match=r"'beamm' \(is it beam\?\)"):
        svod.torch.compile(model, x, options={"beamm": 8})
    run = svod.torch.compile(model, x)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ArgumentError, match="copy Sequential, and compile the copy"):
            copied(run)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    torch.testing.assert_close(run(x), model(x))


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return self.inner(x).relu() * self.scale


@pytest.mark.parametrize(("replace", "said"), [
    (lambda m: setattr(m.inner, "bias", torch.nn.Parameter(torch.ones(2))), r"another bias: it is another float32 \(2,\)"),
    (lambda m: setattr(m, "scale", torch.tensor(3.0)), r"another scale: it is another float32 \(\)"),
    (lambda m: setattr(m, "inner", torch.nn.Linear(3, 2)), "another inner: it is another Linear"),
    (lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True), "another (weight|bias|scale)"),
    (lambda m: m.inner.double(), r"float32 \(2, 3\) is now float64 \(2, 3\)"),
], ids=["parameter", "buffer", "module", "assign", "dtype"])
def test_a_module_that_has_other_parts_than_when_it_was_compiled(replace: Any, said: str) -> None:
    model, x = _Scaled().eval(), torch.ones(2, 3)
    run = svod.torch.compile(model, x)
    torch.nn.Linear(4, 4)       # parameters of others
    torch.testing.assert_close(run(x), model(x))
    replace(model)
    for _ in range(2):
        with pytest.raises(StateError, match=said):
            run(x)
