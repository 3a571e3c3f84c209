"""Module, the base of every layer: parameters by name, and a call that computes a result.

The parameters are the Tensors among a module's attributes, in the order in which they were set, then those of its modules. Their names are
attribute paths such as "encoder.layers.0.weight". Kernels carry the path of the module that made them (`svod.scope`).
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from svod.core.graph.changes import note_change
from svod.core.ir.dtype import dtypes
from svod.core.ir.origin import scope
from svod.errors import ShapeError, StateError
from svod.tensor import Tensor
from svod.tensor.base import DTypeLike


class Module:
    """A layer or a model. Subclasses set parameters and modules as attributes and define `forward`."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """The result of the module; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **options: Any) -> Any:
        path = self.__dict__.get("_path", "")
        if not path:
            return self.forward(*args, **options)
        with scope(path):
            return self.forward(*args, **options)

    reports_changes = True      # of attributes, to captured functions that have read them

    def __setattr__(self, name: str, value: Any) -> None:
        note_change()
        if isinstance(value, Module):
            value._named(name)
        elif isinstance(value, np.ndarray) and isinstance(self.__dict__.get(name, value), Tensor | None):
            value = Tensor(value)       # an array that replaces a parameter becomes a parameter
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        note_change()
        object.__delattr__(self, name)

    def _named(self, path: str) -> None:
        """Set the path of this module in the module that holds it."""
        self.__dict__["_path"] = path

    # -- parameters ------------------------------------------------------------------------------
    def children(self) -> Iterator[tuple[str, Module]]:
        """The modules among the attributes, by name."""
        return ((name, value) for name, value in self.__dict__.items() if isinstance(value, Module))

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every parameter, running statistics included, by its path."""
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                yield prefix + name, value
        for name, child in self.children():
            yield from child.named_parameters(f"{prefix}{name}.")

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter."""
        return (t for _, t in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters by their paths, as PyTorch names them."""
        return dict(self.named_parameters())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Self:
        """Replace parameters by Tensors or arrays, given by their paths, and return self. Their dtypes are kept and nothing is copied.

        Raises StateError for shapes that differ and, if `strict`, for names that are missing or unknown; then no parameter is replaced.
        PyTorch's `num_batches_tracked`, which counts training steps, is ignored."""
        own = self.state_dict()
        given = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
        missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
        if strict and (missing or unknown):
            raise StateError(f"load_state_dict of {type(self).__name__}: missing {_few(missing)}, unknown {_few(unknown)}; strict=False "
                             "loads the others")
        tensors = {name: value if isinstance(value, Tensor) else Tensor(value) for name, value in given.items() if name in own}
        wrong = [f"{n} {t.shape}, the module's is {own[n].shape}" for n, t in tensors.items() if t.shape != own[n].shape]
        if wrong:
            raise StateError(f"load_state_dict of {type(self).__name__}: shapes differ: {_few(wrong)}")
        for name, tensor in tensors.items():
            self._take(name, tensor)
        return self

    def _take(self, path: str, tensor: Tensor) -> None:
        owner, _, name = path.rpartition(".")
        module: Module = self
        for part in owner.split(".") if owner else ():
            module = module.__dict__[part]
        note_change()
        object.__setattr__(module, name, tensor)

    def to(self, dtype: DTypeLike) -> Self:
        """Cast the float parameters and return self."""
        for name, tensor in list(self.named_parameters()):
            if tensor.dtype.is_float:
                self._take(name, tensor.cast(dtype).contiguous())
        return self

    def half(self) -> Self: return self.to(dtypes.float16)
    def bfloat16(self) -> Self: return self.to(dtypes.bfloat16)
    def float(self) -> Self: return self.to(dtypes.float32)

    def eval(self) -> Self:
        """Return self, because svod runs models only."""
        return self

    def __repr__(self) -> str:
        lines = [f"  ({name}): {child!r}".replace("\n", "\n  ") for name, child in self.children()]
        own = ", ".join(f"{n}={list(t.shape)}" for n, t in self.__dict__.items() if isinstance(t, Tensor))
        return f"{type(self).__name__}({own}" + ("\n" + "\n".join(lines) + "\n" if lines else "") + ")"


class ModuleList(Module):
    """A list of modules, which are named by their numbers."""

    def __init__(self, modules: Any = ()) -> None:
        for i, module in enumerate(modules):
            if not isinstance(module, Module):
                raise StateError(f"{type(self).__name__}: element {i} is a {type(module).__name__}, not a Module")
            setattr(self, str(i), module)

    def _named(self, path: str) -> None:
        # a list is not called, so the paths of its modules include its name
        for name, child in self.children():
            child._named(f"{path}.{name}")

    def __len__(self) -> int:
        return sum(1 for _ in self.children())

    def __iter__(self) -> Iterator[Module]:
        return (child for _, child in self.children())

    def __getitem__(self, i: int) -> Module:
        return [child for _, child in self.children()][i]


class Sequential(ModuleList):
    """Modules that are applied one after the other."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def _named(self, path: str) -> None:
        Module._named(self, path)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    """A new parameter, uniform in ±bound, as PyTorch initialises its layers."""
    return Tensor.uniform(shape, low=-bound, high=bound).contiguous()


def fan_in_bound(fan_in: int) -> float:
    """1/sqrt(fan_in). Raises ShapeError for a layer without inputs."""
    if fan_in < 1:
        raise ShapeError(f"a layer with {fan_in} inputs: it needs at least one")
    return 1 / math.sqrt(fan_in)


def _few(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
