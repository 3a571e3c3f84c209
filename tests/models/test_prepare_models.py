"""Models of many equal layers: each distinct kernel is compiled once, and intermediates need little more than the least memory."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.cpu import backend
from svod.compile.plan import compiler as compiler_module
from svod.config import PrepareConfig
from tests.models.test_models import module_of

LAYERS, TOKENS, HIDDEN = 12, 16, 48


@pytest.mark.slow
def test_twelve_equal_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_object: Callable[..., bytes] = backend.compile_object

    def counted(ir: str, *args: Any, **more: Any) -> bytes:
        compiled.append(ir)
        return compile_object(ir, *args, **more)

    monkeypatch.setattr(backend, "compile_object", counted)
    block_of = module_of("bert_block", monkeypatch).BertBlock
    blocks = [block_of(hidden=HIDDEN, heads=4, intermediate=4 * HIDDEN, seed=i) for i in range(LAYERS)]

    def model(x: Tensor) -> Tensor:
        for i, block in enumerate(blocks):
            with svod.scope(f"layers.{i}"):
                x = block(x)
        return x

    x = np.random.default_rng(0).standard_normal((1, TOKENS, HIDDEN), dtype=np.float32)
    f = svod.jit(model, config=PrepareConfig(object_cache=str(tmp_path)))
    y = f(x)
    plan = f.plans[0]
    distinct = {k.key for k in plan.kernels}
    one = [k for k in plan.kernels if k.origin.startswith("layers.3.")]
    assert len(plan.kernels) == LAYERS * len(one) and len(compiled) == len(distinct) < len(one)
    assert {k.origin.split(".")[1] for k in plan.kernels} == {str(i) for i in range(LAYERS)}
    wanted = x
    for block in blocks:
        wanted = block.reference(wanted)
    np.testing.assert_allclose(y.numpy(), wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)

    # the most values alive at once: a layer's perceptron (four times as wide), its input, which is added to the output, and the output
    alive = (4 + 1 + 1) * TOKENS * HIDDEN * 4
    assert alive <= plan.memory.shared <= 1.15 * plan.memory.lower_bound <= 1.15 * alive * 1.05

    # again with other weights and the cached objects
    compiled.clear()
    monkeypatch.setattr(compiler_module, "_compilers", {})     # acts as a new process
    blocks[:] = [block_of(hidden=HIDDEN, heads=4, intermediate=4 * HIDDEN, seed=LAYERS + i) for i in range(LAYERS)]
    y = svod.jit(model, config=PrepareConfig(object_cache=str(tmp_path)))(x)
    assert not compiled
    wanted = x
    for block in blocks:
        wanted = block.reference(wanted)
    np.testing.assert_allclose(y.numpy(), wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
