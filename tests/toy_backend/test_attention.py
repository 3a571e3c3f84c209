"""Attention in one pass over blocks of the keys on the toy device, which reports threads that race or read what nobody has written."""
from __future__ import annotations

import random

import pytest

from svod.compile.backend import BACKENDS
from svod.core.cost.groups.attention import attention_options
from svod.core.cost.groups.prices import GroupPrices
from svod.core.kernel.scheduler import Scheduler
from tests.attention import AttentionCase
from tests.draws import count
from tests.toy_backend.backend import BACKEND
from tests.toy_backend.target import TOY


@pytest.mark.parametrize(("kind", "dtype"), [("causal", "bfloat16"), ("kept", "float16"), ("plain", "float32")])
def test_no_thread_is_ahead_of_what_it_reads(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, TOY.device, BACKEND.__module__)
    for seed in range(count(1)):
        rng = random.Random(f"{kind} {seed}")
        case = AttentionCase.draw(rng, kind, dtype, (1, 16, 64, 3, rng.choice((2, 3, 4))))
        found = GroupPrices().cheapest(attention_options(Scheduler(case.kernel(), TOY)), 1 << 20)
        assert found
        case.check(rng.choice(found)[1].applied_opts, TOY.device)
