"""Module, the base of every layer: parameters and buffers by name, and a call that computes a result.

    self.weight = Tensor(w)                                     a parameter, as every tensor that is an attribute
    self.register_buffer("mean", Tensor(m))                     a buffer in the state dictionary (running statistics)
    self.register_buffer("cache", Tensor(c), persistent=False)  a buffer outside of the state dictionary (a key-value cache)

A module's own tensors come first, in the order in which they were set, then the tensors of its modules. Their names are attribute paths
such as "encoder.layers.0.weight". Kernels carry the path of the module that made them (`svod.scope`).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from svod.core.graph.changes import note_change
from svod.core.ir.dtype import dtypes, is_dtype_name
from svod.core.ir.origin import scope
from svod.errors import ArgumentError, ShapeError, StateError
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

    reports_changes = True      # changed attributes are reported to captured functions that have read them

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

    # -- modules ---------------------------------------------------------------------------------
    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The submodules among the attributes, by name."""
        return ((name, value) for name, value in self.__dict__.items() if isinstance(value, Module))

    def children(self) -> Iterator[Module]:
        """The submodules among the attributes."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all modules below it, each once, by path. `prefix` is the path of this module."""
        seen: set[int] = set()

        def under(path: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                for name, child in module.named_children():
                    yield from under(f"{path}.{name}" if path else name, child)
        return under(prefix, self)

    def modules(self) -> Iterator[Module]:
        """This module and all modules below it, each once."""
        return (module for _, module in self.named_modules())

    def apply(self, fn: Callable[[Module], object]) -> Self:
        """Call `fn` with every module below and with this one, submodules first; returns self."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    @property
    def training(self) -> bool:
        """The mode set by `train`: True makes dropout drop elements. False for a new module, because svod runs models."""
        return bool(self.__dict__.get("_training", False))

    def train(self, mode: bool = True) -> Self:
        """Set `training` of this module and all modules below it; returns self. Batch norm refuses to run in training."""
        note_change()
        for module in self.modules():
            module.__dict__["_training"] = bool(mode)
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    # -- parameters and buffers --------------------------------------------------------------------
    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Set an attribute to a tensor, an array or None as a buffer, not a parameter. `persistent`: whether the state dictionary includes
        it.

        Raises StateError for a name that is no identifier or is taken."""
        if not name.isidentifier() or (name in self.__dict__ and name not in self._buffers()) or hasattr(type(self), name):
            raise StateError(f"register_buffer({name!r}) of {type(self).__name__}: the name is taken, or no identifier")
        self.__dict__.setdefault("_registered", {})[name] = persistent
        setattr(self, name, tensor if tensor is None or isinstance(tensor, Tensor) else Tensor(tensor))

    def _buffers(self) -> Mapping[str, bool]:
        """Whether each buffer is persistent, by name."""
        found: dict[str, bool] = self.__dict__.get("_registered", {})
        return found

    def _named(self, path: str) -> None:
        """Set the attribute path of this module within the outermost module."""
        self.__dict__["_path"] = path

    def _named_tensors(self, prefix: str, buffers: bool | None, transient: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this module and of the modules below, by path. `buffers`: True for buffers, False for parameters, None for
        both. Buffers that are not persistent are left out unless `transient`."""
        own = self._buffers()
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor) and buffers in (None, name in own) and (transient or own.get(name, True)):
                yield prefix + name, value
        for name, child in self.named_children():
            yield from child._named_tensors(f"{prefix}{name}.", buffers, transient)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its path."""
        return self._named_tensors(prefix, False)

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every buffer by its path."""
        return self._named_tensors(prefix, True)

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter."""
        return (t for _, t in self.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Every buffer."""
        return (t for _, t in self.named_buffers())

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and the persistent buffers by path, as PyTorch names them."""
        return dict(self._named_tensors("", None, transient=False))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Self:
        """Replace parameters and buffers by Tensors or arrays, given by their paths, and return self. Their dtypes are kept, and nothing is
        copied. PyTorch's parameters are read without their gradients.

        Raises ArgumentError for a non-mapping. Raises StateError for shapes that differ and, if `strict`, for names that are missing
        or unknown; then no parameter is replaced. PyTorch's `num_batches_tracked`, which counts training steps, is ignored."""
        if not isinstance(state, Mapping):
            hint = ", pass its state_dict()" if hasattr(state, "state_dict") else ""
            raise ArgumentError(f"load_state_dict of {type(self).__name__} takes a mapping from names to tensors or arrays, got "
                                f"{type(state).__name__}{hint}")
        own = self.state_dict()
        given = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
        missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
        if strict and (missing or unknown):
            raise StateError(f"load_state_dict of {type(self).__name__}: missing {_few(missing)}, unknown {_few(unknown)}; strict=False "
                             "loads the others")
        tensors = {name: _weight(value) for name, value in given.items() if name in own}
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

    def to(self, target: DTypeLike) -> Self:
        """Cast the float parameters and buffers, or copy all of them to a device ("WEBGPU", "CUDA:1") now, and return self."""
        tensors = dict(self._named_tensors("", None))
        if isinstance(target, str) and not is_dtype_name(target):
            moved = {name: tensor.to(target) for name, tensor in tensors.items()}
            Tensor.realize_batch(moved.values())
        else:
            moved = {name: t.cast(target).contiguous() for name, t in tensors.items() if t.dtype.is_float}
        for name, tensor in moved.items():
            self._take(name, tensor)
        return self

    def half(self) -> Self: return self.to(dtypes.float16)
    def bfloat16(self) -> Self: return self.to(dtypes.bfloat16)
    def float(self) -> Self: return self.to(dtypes.float32)

    def __repr__(self) -> str:
        lines = [f"  ({name}): {child!r}".replace("\n", "\n  ") for name, child in self.named_children()]
        own = ", ".join(f"{n}={list(t.shape)}" for n, t in self.__dict__.items() if isinstance(t, Tensor))
        return f"{type(self).__name__}({own}" + ("\n" + "\n".join(lines) + "\n" if lines else "") + ")"


class _Container(Module):
    """A container that is never called itself: its modules' paths include its name."""

    def _named(self, path: str) -> None:
        for name, child in self.named_children():
            child._named(f"{path}.{name}")

    def __len__(self) -> int:
        return sum(1 for _ in self.children())


class ModuleList(_Container):
    """A list of modules; their names are their positions."""

    def __init__(self, modules: Any = ()) -> None:
        for i, module in enumerate(modules):
            if not isinstance(module, Module):
                raise StateError(f"{type(self).__name__}: element {i} is a {type(module).__name__}, not a Module")
            setattr(self, str(i), module)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, i: int) -> Module:
        return list(self.children())[i]


class ModuleDict(_Container):
    """A dictionary of modules by name."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] = ()) -> None:
        self.update(modules)

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add modules, or replace them. Raises StateError for a value that is not a module."""
        for name, module in dict(modules).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(module, Module) or not isinstance(name, str) or hasattr(type(self), name):
            raise StateError(f"ModuleDict: {name!r} is a {type(module).__name__}, not a Module, or the name is taken")
        setattr(self, name, module)

    def __getitem__(self, name: str) -> Module:
        return dict(self.named_children())[name]

    def __delitem__(self, name: str) -> None:
        delattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in dict(self.named_children())

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.named_children())

    def keys(self) -> Iterator[str]: return iter(self)
    def values(self) -> Iterator[Module]: return self.children()
    def items(self) -> Iterator[tuple[str, Module]]: return self.named_children()


class Sequential(ModuleList):
    """Applies modules one after the other."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def _named(self, path: str) -> None:
        Module._named(self, path)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


def Parameter(data: Any, requires_grad: bool = True) -> Tensor:
    """Return `data` as a tensor: every attribute of a module that is a tensor is a parameter. svod computes no gradients, so
    `requires_grad` has no effect."""
    return data if isinstance(data, Tensor) else Tensor(data)


def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    """A new parameter with random values uniform in ±bound, as in PyTorch's layers."""
    return Tensor.uniform(shape, low=-bound, high=bound).contiguous()


def fan_in_bound(fan_in: int) -> float:
    """The bound 1/sqrt(fan_in) of initial weights. Raises ShapeError for a layer without inputs."""
    if fan_in < 1:
        raise ShapeError(f"a layer with {fan_in} inputs: it needs at least one")
    return 1 / math.sqrt(fan_in)


def _weight(value: Any) -> Tensor:
    """Convert a weight to a tensor. A parameter of PyTorch is detached first; otherwise PyTorch does not share its memory."""
    if isinstance(value, Tensor):
        return value
    return Tensor(value.detach() if getattr(value, "requires_grad", False) else value)


def _few(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
