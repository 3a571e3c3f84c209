"""Buffers that a module writes, which move and change their form between calls: against PyTorch."""
from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch  # noqa: E402
from svod.errors import StateError  # noqa: E402
from svod.torch import watch as watch_module  # noqa: E402

SIDE = 5


class _Cell(torch.nn.Module):
    """Two buffers that it writes, one that it reads, and a square weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(SIDE, SIDE, bias=False)
        for name in ("sums", "seen", "scale"):
            self.register_buffer(name, torch.randn(SIDE, SIDE))

    def forward(self, x: Any) -> Any:
        y = self.mix(x)
        self.sums.add_(y.sum(0))
        self.seen.copy_(self.seen.t() * 0.5 + self.scale)
        return y @ self.sums + self.seen.sum(1)


def _gaps(t: Any) -> Any:
    wide = torch.full((SIDE, 2 * SIDE), 7.0)
    wide[:, ::2] = t
    return wide[:, ::2]


CHANGES: list[Any] = [
    lambda t: setattr(t, "data", t.data.clone()), lambda t: setattr(t, "data", t.data.t()), lambda t: setattr(t, "data", _gaps(t.data)),
    lambda t: setattr(t, "data", t.data.t().clone(memory_format=torch.contiguous_format)), lambda t: t.data.mul_(0.5),
    lambda t: t.detach().numpy().__iadd__(0.25), lambda t: t.data.t_(), lambda t: t.data.copy_(t.data.flip(0)),
]


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("door", ["exported", "dynamo"])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_module_keeps_may_move_and_change_its_form(door: str, is_native: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(watch_module, "native", lambda: None)
    torch._dynamo.reset()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    ours, theirs = _Cell(), _Cell()
    theirs.load_state_dict(ours.state_dict())
    rows = [torch.randn(n, SIDE) for n in (2, 3, 4)]
    run = (torch.compile(ours, backend="svod", dynamic=True) if door == "dynamo" else
           svod.torch.compile(ours, rows[1], dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2, max=8)}}))
    names = ["mix.weight", "sums", "seen", "scale"]
    with torch.no_grad():
        for _ in range(25):
            for name in rng.sample(names, rng.choice((0, 0, 1, 2))):
                change = rng.choice(CHANGES)
                for module in (ours, theirs):
                    change(module.get_parameter(name) if name.endswith("weight") else module.get_buffer(name))
            x = rng.choice(rows) if rng.random() < 0.7 else torch.randn(3, SIDE)
            torch.testing.assert_close(run(x), theirs(x))
            for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride()


def test_a_kept_buffer_of_another_type_is_refused() -> None:
    module = _Cell()
    with torch.no_grad():
        run = svod.torch.compile(module, torch.ones(2, SIDE))
        run(torch.ones(2, SIDE))
        module.sums.data = module.sums.data.double()
        with pytest.raises(StateError, match="sums"):
            run(torch.ones(2, SIDE))


def test_who_binds_other_memory_to_the_plan_has_it_bound_back() -> None:
    """The plan is at hand as `plans`; what the module keeps stays what a call writes."""
    module = torch.nn.Module()
    module.register_buffer("count", torch.zeros(3))
    module.forward = lambda x: module.count.add_(x)     # type: ignore[method-assign]
    with torch.no_grad():
        run = svod.torch.compile(module, torch.ones(3))
        run(torch.ones(3))
        (plan,) = run.plans
        elsewhere = {n: torch.zeros(3).numpy() for n, b in enumerate(plan.buffers) if b.kind != "intermediate"}
        for number, array in elsewhere.items():
            plan.bind_array(number, array)
        run(torch.ones(3))
    assert module.count.tolist() == [2, 2, 2] and not any(map(any, elsewhere.values()))
