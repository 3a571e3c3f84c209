"""Tensors that share memory, and writes through one of them: compared with PyTorch."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="svod", dynamic=False)
    return made


def agree(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compare the outputs and the arguments with PyTorch's; returns the outputs."""
    theirs, ours = [a.clone() for a in arguments], [a.clone() for a in arguments]
    wanted, got = function(*theirs), compiled(function)(*ours)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(ours, theirs)
    return got


def test_copies_keep_what_an_argument_held() -> None:
    def swapped(a: Any, b: Any) -> Any:
        before = a.clone()
        a.copy_(b)
        b.copy_(before)
        return before, before.view(-1)
    agree(swapped, torch.arange(6.0).reshape(2, 3), torch.ones(2, 3))


def test_writes_through_views() -> None:
    def function(a: Any) -> Any:
        t = a.transpose(0, 1)
        t[1:].mul_(2)
        t.reshape(-1).add_(100)
        a[:, :-1] = a[:, 1:].clone()
        a.diagonal().zero_()
        return t, a.view(-1)[::2]
    agree(function, torch.arange(15.0).reshape(3, 5))


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x[1:], lambda x: x.t()[1:, ::2], lambda x: x[None].expand(2, 3, 4),
                                  lambda x: x])
def test_outputs_that_are_views_of_one_tensor_share_its_memory(view: Callable[[Any], Any]) -> None:
    """In any order of the outputs, a write to the whole is visible in the part."""
    def function(a: Any) -> Any:
        whole = a * 2
        return view(whole), whole
    part, whole = agree(function, torch.arange(12.0).reshape(3, 4))
    whole.fill_(7)
    assert bool((part == 7).all())


def test_parts_without_a_whole_have_memory_of_their_own() -> None:
    def function(a: Any) -> Any:
        whole = a * 2
        return whole[:, 1:], whole[:, :-1]
    agree(function, torch.arange(12.0).reshape(3, 4))


def test_as_strided_beyond_the_elements_of_an_argument() -> None:
    def function(a: Any) -> Any:
        return a.as_strided((2,), (2,), 0) + 1
    storage = torch.arange(3.0)
    torch.testing.assert_close(compiled(function)(storage[:2]), torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_an_output_that_is_an_argument_under_which_another_lies(offset: int) -> None:
    def function(a: Any, b: Any) -> Any:
        read, same = a.sum(), b.contiguous()
        b[b > 0] = -3
        return read, same
    mine, theirs = (torch.tensor([4, -4, -9, 5, 0]) for _ in range(2))
    found, expected = compiled(function)(mine[:4], mine[offset:offset + 3]), function(theirs[:4], theirs[offset:offset + 3])
    torch.testing.assert_close((*found, mine), (*expected, theirs))
