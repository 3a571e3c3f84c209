"""Watches of tensors: what is compared, which changes are seen, and what a watch keeps alive."""
from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch.watch as watch_module  # noqa: E402
from svod.compile.plan.object_cache import stored_builds  # noqa: E402
from svod.torch.watch import TensorWatch, sampled  # noqa: E402


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 63, 1000])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "float64", "int64"])
def test_what_is_sampled_of_a_tensor_lies_in_it(size: int, dtype: str) -> None:
    t = torch.zeros(size + 1, dtype=getattr(torch, dtype))[1:]         # its first byte has an odd address
    begin, end = t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()
    words = sampled(t, 16)
    assert len(words) == len(set(words)) <= 16 and all(begin <= 4 * w and 4 * w + 4 <= end for w in words)
    watch = TensorWatch([t, torch.zeros(5)])
    assert watch.is_unchanged()
    t.detach().numpy().view("uint8").__iadd__(1)        # a write that does not change the version
    assert watch.is_unchanged() == (not len(words))


def test_the_native_pass_is_kept_among_the_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_OBJECT_CACHE", str(tmp_path))
    for _ in range(2):
        assert watch_module.native.__wrapped__() is not None
        monkeypatch.setattr("svod.compile.cpu.runtime.compile_object", None)
    assert [kept.objects for kept in stored_builds(tmp_path).values()] == [1]


def test_a_watch_keeps_the_machine_code_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to the process's native pass: a watch calls the code of its own."""
    own = watch_module.native.__wrapped__()
    code = weakref.ref(own.code)
    with monkeypatch.context() as patched:
        patched.setattr(watch_module, "native", lambda own=own: own)
        watch = watch_module.TensorWatch([torch.ones(3)])
    del own
    gc.collect()
    assert code() is not None and watch.is_unchanged()
    del watch
    gc.collect()
    assert code() is None


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference"])
def test_changes_that_are_watched(is_native: bool, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch_module.native() is not None, "this PyTorch has the functions that it takes"
    if not is_native:
        monkeypatch.setattr(watch_module, "native", lambda: None)
    with torch.inference_mode(inference):
        tensors = [torch.randn(40, 7), torch.ones(3), torch.zeros(0), torch.tensor(1.5), torch.ones(6, dtype=torch.int64)]
        for t in [t for t in tensors if t.numel()]:
            for change in (lambda t: t.add_(1), lambda t: setattr(t, "data", t.data.clone()), lambda t: t.data.add_(1),
                           lambda t: t.numpy().__iadd__(1)):
                watch = TensorWatch(tensors)
                assert watch.is_unchanged() and watch.is_unchanged()
                change(t)
                assert not watch.is_unchanged()


def test_a_watch_lets_its_tensors_go() -> None:
    t = torch.randn(64)
    memory = weakref.ref(t)
    watch = TensorWatch([t])
    del t
    assert memory() is not None
    del watch
    gc.collect()
    assert memory() is None
