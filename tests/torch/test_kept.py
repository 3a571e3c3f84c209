"""Buffers that a module writes, which move and change their form between calls, against PyTorch."""
from __future__ import annotations

import gc
import random
import weakref
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import svod.torch  # noqa: E402
from svod.errors import SharedMemoryError, StateError  # noqa: E402
from svod.torch import kept as kept_module  # noqa: E402
from svod.torch import watch as watch_module  # noqa: E402
from svod.torch.functions import functions  # noqa: E402
from svod.torch.kept import WrittenArguments  # noqa: E402
from tests.draws import a_quarter  # noqa: E402

SIDE = 5


class _Cell(torch.nn.Module):
    """A cell with two buffers that it writes, one that it reads, and a square weight."""

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


@pytest.mark.parametrize(("seed", "door", "is_native"), a_quarter(product(range(3), ["exported", "dynamo"], [True, False])))
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
    """The user may bind other memory through `plans`; the next call binds the module's buffers again."""
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


class _Count(torch.nn.Module):
    """A buffer of three numbers that counts its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        self.count.add_(x.sum(0))
        return self.count * 2


ROWS = {"x": {0: torch.export.Dim("rows", min=1, max=8)}}


@torch.no_grad()
def test_memory_replaced_while_a_call_reads_it_is_not_what_later_calls_write() -> None:
    """Acts as another thread between the check of addresses and the read; afterwards the former memory is restored."""
    module = _Count()
    run = svod.torch.compile(module, torch.ones(2, 3))
    run(torch.ones(2, 3))
    first, second = torch.zeros(3), torch.zeros(3)
    (plan,) = run.function.plans
    (k,) = (k for k, s in enumerate(plan.sources) if s.argument in run.function.kept)
    source = plan.sources[k]

    def read(t: Any) -> Any:
        t.data = second
        return source.read(t)
    module.count.data = first
    plan.sources[k] = source._replace(read=read)
    run(torch.ones(2, 3))
    plan.sources[k] = source
    module.count.data = first
    run(torch.ones(2, 3))
    assert first.tolist() == [2, 2, 2] and second.tolist() == [2, 2, 2]


def test_forms_are_equal_by_what_they_say_and_are_not_collected() -> None:
    kept = WrittenArguments([0], bound=False)
    forms = [kept.places([t]).form for t in (torch.zeros(3, 2), torch.ones(3, 2), torch.zeros(2, 3).t(), torch.zeros(3, 2).half())]
    assert forms[0] == forms[1] and hash(forms[0]) == hash(forms[1]) and len({*forms}) == 3
    seen = [weakref.ref(f) for f in forms]
    del forms
    kept.places([torch.zeros(5)])
    gc.collect()
    assert not any(r() for r in seen)


@torch.no_grad()
def test_modules_of_one_graph_are_looked_at_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    made = []
    places = kept_module.TensorPlaces
    monkeypatch.setattr(kept_module, "TensorPlaces", lambda tensors: made.append(places(tensors)) or made[-1])
    ours, theirs = [_Cell() for _ in range(3)], [_Cell() for _ in range(3)]
    runs = [torch.compile(m, backend="svod") for m in ours]
    x = torch.randn(3, SIDE)
    for a, b in zip(ours, theirs, strict=True):
        b.load_state_dict(a.state_dict())
    for _ in range(3):
        for run, b in zip(runs, theirs, strict=True):
            torch.testing.assert_close(run(x), b(x))
    assert len(made) == 3


@torch.no_grad()
@pytest.mark.parametrize("gaps", ["kept", "weight"])
def test_a_kept_buffer_that_lies_in_a_weight_is_refused_with_gaps_too(gaps: str) -> None:
    """If one of the two is copied, the run cannot detect that they share memory."""
    module = _Cell()
    run = svod.torch.compile(module, torch.ones(2, SIDE))
    run(torch.ones(2, SIDE))
    wide = torch.randn(2 * SIDE, SIDE)
    dense, apart = wide[:SIDE], wide[::2]
    (module.sums.data, module.mix.weight.data) = (apart, dense) if gaps == "kept" else (dense, apart)
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match="share memory"):
            run(torch.ones(2, SIDE))
    module.sums.data = torch.zeros(SIDE, SIDE)
    theirs = _Cell()
    theirs.load_state_dict(module.state_dict())
    torch.testing.assert_close(run(torch.ones(2, SIDE)), theirs(torch.ones(2, SIDE)))


@torch.no_grad()
def test_plans_for_other_sizes_keep_neither_old_memory_nor_arguments() -> None:
    module = _Count()
    run = svod.torch.compile(module, torch.ones(3, 3), dynamic_shapes=ROWS)
    gone = []
    for rows in (2, 3, 4, 2, 3, 4, 2):
        x = torch.ones(rows, 3)
        run(x)
        gone += [StorageWeakRef(x.untyped_storage()), StorageWeakRef(module.count.untyped_storage())]
        module.count.data = module.count.data.clone()
    del x
    run(torch.ones(5, 3))
    gc.collect()
    assert [r.expired() for r in gone] == [True] * len(gone) and module.count.tolist() == [25] * 3


@torch.no_grad()
def test_plans_for_other_sizes_keep_no_large_arguments() -> None:
    """Small arguments may be kept, because binding them again in every call would take longer than a small kernel."""
    run = svod.torch.compile(torch.nn.ReLU(), torch.ones(3, 100_000), dynamic_shapes={"input": {0: torch.export.Dim("rows", min=2, max=8)}})
    gone = []
    for rows in (3, 4, 5, 3, 4, 5):
        x = torch.ones(rows, 100_000)
        y = run(x)
        gone += [StorageWeakRef(x.untyped_storage()), StorageWeakRef(y.untyped_storage())]
    del x, y
    run(torch.ones(2, 100_000))
    gc.collect()
    assert [r.expired() for r in gone] == [True] * len(gone)


class _Inverse(torch.nn.Module):
    """A module in which PyTorch runs `inv` inside the plan, and raises for a singular matrix, after a write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.eye(3))

    def forward(self, x: Any) -> Any:
        self.sums.add_(x)
        return torch.linalg.inv(self.sums) @ x


@torch.no_grad()
@pytest.mark.parametrize("door", ["exported", "dynamo"])
def test_after_a_call_that_raises_the_next_one_runs_in_svod(door: str) -> None:
    torch._dynamo.reset()
    ours, theirs, eye = _Inverse(), _Inverse(), torch.eye(3)
    before = {*functions}
    run = svod.torch.compile(ours, eye) if door == "exported" else torch.compile(ours, backend="svod")
    torch.testing.assert_close(run(eye), theirs(eye))
    for call in (run, theirs):
        with pytest.raises(torch.linalg.LinAlgError):
            call(-2 * eye)
    for _ in range(2):
        torch.testing.assert_close(run(eye), theirs(eye))
        torch.testing.assert_close(ours.sums, theirs.sums)
    (function,) = {*functions} - before
    assert not function.refused and [p.runs for p in function.plans] == [2]
