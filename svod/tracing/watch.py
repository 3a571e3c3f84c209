"""Watches the values that a captured function reads besides its arguments, and detects changes since the capture.

    W = Tensor(w)                       f = svod.jit(lambda x: x @ W * scale)

    what                                how a change is seen                            what it costs per call
    a name, an attribute, an element    another object than at capture                  some 50 ns each
    an attribute of an nn.Module        the module reports it                           nothing
    a tensor's memory                   svod counts its writes to it                    nothing
    a NumPy array                       NumPy refuses writes while the capture lives    nothing
    memory of another library           not at all: it is an input of each run          it cannot be folded or packed once

A function's closure, globals, default values, the functions it names, and the objects that these hold are watched, too. Lists, dicts and
sets of more than `MOST_ITEMS` are watched by their length only. Modules of svod, NumPy and the standard library are not watched. Random
generators and iterators are refused: the capture would call them once, where the function calls them each time.
"""
from __future__ import annotations

import dis
import enum
import functools
import io
import random
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from svod.core.graph.buffer import Array, Buffer
from svod.core.graph.changes import changes
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.ir.variable import Dim
from svod.errors import SvodError
from svod.tensor import Tensor

MOST_ITEMS = 1000
_MISSING = object()
_BY_ANY_NAME = {"getattr", "vars", "__dict__"}      # code that mentions one of these names may read any attribute
_NUMBERS = (bool, int, float, complex, str, bytes)
_CONSTANTS = (*_NUMBERS, type(None), type, enum.Enum, np.dtype, np.generic, DType, Dim, UOp, types.BuiltinFunctionType, types.ModuleType,
              range, slice)
_NOT_FOLLOWED = {"svod", "numpy", *sys.stdlib_module_names} - {"__main__"}


class ReadValues:
    """A snapshot of the values that a function reads. `changed()` compares it with the present ones."""

    def __init__(self, name: str) -> None:
        self._function = name
        self._names: list[list[Any]] = []                       # [globals of a module, name, value]
        self._attributes: list[list[Any]] = []  # [__dict__, name, value] of objects; `close` drops names that no followed function mentions
        self._named: set[str] = set()                           # names of globals and attributes in the code of followed functions
        self._cells: list[list[Any]] = []                       # [closure cell, name, value]
        self._slots: list[tuple[Any, str, Any]] = []            # (object, slot, value)
        self._containers: list[tuple[Any, int, tuple[Any, ...]]] = []       # (container, its length, its items if they are few)
        self._reported: list[tuple[dict[str, Any], dict[str, Any]]] = []    # (__dict__ of a module, its copy)
        self._tensors: list[tuple[Tensor, UOp]] = []            # (tensor, its node at the snapshot)
        self._buffers: dict[Buffer, int] = {}                   # versions of watched buffers at the snapshot
        self._held: list[Buffer] = []
        self._frozen: list[Array] = []
        self._seen: dict[int, Any] = {}                         # key: id; the object is kept alive, so that no other object gets its id
        self._count = changes.count
        weakref.finalize(self, _release, self._held, self._frozen)

    def hold(self, constants: Iterable[Buffer]) -> None:
        """Watch buffers whose content the capture reads once."""
        for buffer in constants:
            buffer.watched += 1
            self._held.append(buffer)

    def close(self) -> None:
        """Take the snapshot that `changed` compares with: versions of buffers, nodes of tensors, attributes that the code names."""
        self._buffers = {buffer: buffer.version for buffer in self._held}
        self._tensors = [(t, t.uop) for t, _ in self._tensors]      # the node may have changed since `follow`: the tensor was computed
        if self._named.isdisjoint(_BY_ANY_NAME):
            self._attributes = [entry for entry in self._attributes if entry[1] in self._named]
        self._names += self._attributes
        self._count = changes.count
        self._seen.clear()

    # -- has it changed -----------------------------------------------------------------------------
    def changed(self) -> str:
        """The name of a value that has changed since the capture; "" for none."""
        for entry in self._names:
            container, key, value = entry
            now = container.get(key, _MISSING)
            if now is not value:
                if not _same(now, value):
                    return str(key)
                entry[2] = now
        for entry in self._cells:
            cell, name, value = entry
            now = _content(cell)
            if now is not value:
                if not _same(now, value):
                    return str(name)
                entry[2] = now
        for owner, slot, value in self._slots:
            now = getattr(owner, slot, _MISSING)
            if now is not value and not _same(now, value):
                return slot
        for container, length, items in self._containers:
            if len(container) != length or (items and not all(map(_same, _items(container), items))):
                return f"a {type(container).__name__} of {length}"
        return self._reported_change() if changes.count != self._count else ""

    def _reported_change(self) -> str:
        """The first reported change since the snapshot of a watched buffer, tensor or module; "" for none."""
        count = changes.count
        if any(buffer.version != version for buffer, version in self._buffers.items()):
            return "the content of a tensor"
        if any(t.uop is not node for t, node in self._tensors):
            return "a tensor"
        for own, copy in self._reported:
            if own.keys() != copy.keys():
                return "the attributes of a module"
            for name, value in copy.items():
                if not _same(own[name], value):
                    return name
        self._count = count
        return ""

    # -- the snapshot ------------------------------------------------------------------------------
    def follow(self, value: Any) -> None:
        """Watch a value and all values that it refers to."""
        todo = [value]
        while todo:
            v = todo.pop()
            if isinstance(v, _CONSTANTS) or id(v) in self._seen:
                continue
            self._seen[id(v)] = v
            todo += self._held_by(v)

    def _held_by(self, v: Any) -> Iterable[Any]:
        """Register a value that is not a constant. Returns the values that it refers to."""
        if isinstance(v, Tensor):
            self._tensors.append((v, v.uop))
            return ()
        if isinstance(v, np.ndarray):
            self.freeze(v)
            return ()
        if isinstance(v, types.FunctionType):
            return self._names_of(v)
        if isinstance(v, types.MethodType):
            return v.__self__, v.__func__
        if isinstance(v, functools.partial):
            return v.func, *v.args, *v.keywords.values()
        if isinstance(v, (property, classmethod, staticmethod)):
            return [f for f in (getattr(v, n, None) for n in ("fget", "__func__")) if f is not None]
        if isinstance(v, (tuple, frozenset)):
            return v
        if isinstance(v, (list, dict, set)):
            few = len(v) <= MOST_ITEMS
            items = tuple(_items(v)) if few else ()
            self._containers.append((v, len(v), items))
            return items
        if isinstance(getattr(v, "__wrapped__", None), types.FunctionType):
            return (v.__wrapped__,)
        if isinstance(v, (np.random.Generator, np.random.RandomState, random.Random, Iterator)) and not isinstance(v, io.IOBase):
            raise SvodError(f"svod.jit: {self._function} reads a {type(v).__name__}, which is asked once, at capture; draw numbers "
                            "with Tensor.rand and svod.jit(…, random=\"fresh\"), or pass what is drawn as an argument")
        return self._attributes_of(v)

    def _attributes_of(self, v: Any) -> Iterable[Any]:
        """Watch an object's attributes. Returns their values, and the functions of its class."""
        kind = type(v)
        if _is_foreign(kind.__module__) and not getattr(kind, "reports_changes", False):
            return ()
        held: list[Any] = [f for c in kind.__mro__ if not _is_foreign(c.__module__) for f in vars(c).values()
                           if isinstance(f, (types.FunctionType, property, classmethod, staticmethod))]
        own = getattr(v, "__dict__", None)
        if isinstance(own, dict):
            if getattr(kind, "reports_changes", False):
                self._reported.append((own, dict(own)))
            else:
                self._attributes += [[own, key, value] for key, value in own.items()]
            held += own.values()
        for slot in (s for c in kind.__mro__ for s in _slots_of(c)):
            value = getattr(v, slot, _MISSING)
            self._slots.append((v, slot, value))
            held.append(value)
        return held

    def _names_of(self, function: types.FunctionType) -> list[Any]:
        """Watch the values that a function reads by name. Returns them."""
        if _is_foreign(function.__module__):
            return []
        held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _content(cell)
            self._cells.append([cell, name, value])
            held.append(value)
        names = set(_names_in(function.__code__))
        self._named |= names
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                if not _is_foreign(value.__name__):
                    held += self._names_in_module(value, names)
            elif not isinstance(value, (type, types.BuiltinFunctionType)):
                self._names.append([function.__globals__, name, value])
                held.append(value)
        return held

    def _names_in_module(self, module: types.ModuleType, names: set[str]) -> list[Any]:
        """Watch the data and functions of a module that are among `names`. Returns them."""
        held = []
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if not isinstance(value, (type, types.ModuleType)):
                self._names.append([vars(module), name, value])
                held.append(value)
        return held

    def freeze(self, array: Array) -> bool:
        """Make NumPy refuse writes to an array while this watch lives. Returns False if the memory can be written otherwise: another
        library owns it."""
        chain: list[Array] = []
        owner: Any = array
        while isinstance(owner, np.ndarray):
            chain.append(owner)
            owner = owner.base
        if owner is not None and chain[-1].flags.writeable:
            return False
        for a in reversed(chain):
            _freeze(a)
            self._frozen.append(a)
        return True


def _same(now: Any, then: Any) -> bool:
    """Whether two values are one object, or equal constants."""
    return now is then or (type(now) is type(then) and isinstance(then, _NUMBERS) and repr(now) == repr(then))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:      # not assigned yet
        return _MISSING


def _items(container: Any) -> Iterable[Any]:
    return [x for pair in container.items() for x in pair] if isinstance(container, dict) else container


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function's code, and the functions defined in it, read."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_") and i.opcode in dis.hasname)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [s for s in ([slots] if isinstance(slots, str) else slots) if not s.startswith("__")]


def _is_foreign(module: Any) -> bool:
    """Whether a module is svod's, NumPy's or of the standard library, whose values are not watched."""
    return not isinstance(module, str) or module.partition(".")[0] in _NOT_FOLLOWED


# -- arrays that NumPy guards ---------------------------------------------------------------------------

_guarded: dict[int, list[Any]] = {}       # key: id; value: [array, number of watches, writable before]


def _freeze(array: Array) -> None:
    entry = _guarded.setdefault(id(array), [array, 0, array.flags.writeable])
    entry[1] += 1
    array.flags.writeable = False


def _release(buffers: list[Buffer], frozen: list[Array]) -> None:
    """Stop watching these buffers and arrays: the watch was garbage-collected. Arrays become writable again as they were before."""
    for buffer in buffers:
        buffer.watched -= 1
        if not buffer.watched and buffer.shared:
            buffer.forget_copies()      # writes to its array are no longer detected from now on
    for array in frozen:
        _guarded[id(array)][1] -= 1
    # arrays come before their views; a view whose owner is still guarded keeps its entry until the owner is released
    for key, (array, watches, was_writable) in list(_guarded.items()):
        if not watches and (not was_writable or _can_be_written(array)):
            del _guarded[key]
            array.flags.writeable = was_writable


def _can_be_written(array: Array) -> bool:
    """Whether NumPy lets an array be made writable: it owns its memory, or the owner is writable."""
    return not isinstance(array.base, np.ndarray) or bool(array.base.flags.writeable)
