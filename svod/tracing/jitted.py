"""Defines `svod.jit`: the captured function, its plans by signature, and the conditions for capturing it again."""
from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any, Literal

import numpy as np

from svod.compile.plan.execution_plan import ExecutionPlan
from svod.config import PrepareConfig
from svod.errors import ArgumentError, ConfigError, SvodError
from svod.system.forksafe import remake_after_fork
from svod.tensor import Tensor
from svod.tensor.operations.random import next_keys
from svod.tracing.arguments import Leaf, as_tensor, in_memory, key_of, substitute
from svod.tracing.capture import capture, is_capturing
from svod.tracing.captured import Captured
from svod.tracing.lengths import ArgumentsForm, Lengths, OnePlan, form_of

MOST_PLANS = 64         # most plans that one function keeps; the least recently used one is dropped
RECAPTURES_SAID = 8     # captures of one signature after which a warning names the value that changes
log = logging.getLogger("svod.jit")


class Jit:
    """The result of `svod.jit`. Call it like the function. `sized`: whether results of symbolic shapes may be tensors of the sizes that
    they have in the call."""

    def __init__(self, fn: Callable[..., Any], config: PrepareConfig | None = None, random: str = "captured", dynamic: str = "tell",
                 sized: bool = False):
        _check_arguments(fn, config, random, dynamic)
        self.fn, self.config, self.random, self.dynamic, self.sized = fn, config, random, dynamic, sized
        self._captured: dict[Hashable, Captured] = {}
        self._renewed: dict[Hashable, int] = {}
        self._lengths = Lengths()
        self._for_all_lengths: dict[Hashable, OnePlan | None] = {}      # form without lengths: its plan; None: each length has its own
        self._lock = threading.RLock()
        # a forked child captures again: a plan that was running during the fork cannot run there; kernels may be searched once more
        for name, make in (("_captured", dict), ("_renewed", dict), ("_for_all_lengths", dict), ("_lock", threading.RLock)):
            remake_after_fork(self, name, make)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: list[Leaf] = []
        values: dict[str, int] = {}
        key: Hashable = tuple([key_of(a, given, values) for a in args])
        if kwargs:
            key = key, tuple([(k, key_of(v, given, values)) for k, v in kwargs.items()])
        if is_capturing():
            stand_ins = iter([as_tensor(g) for g in given])
            return self.fn(*substitute(args, stand_ins), **substitute(kwargs, stand_ins))
        captured = self._captured.get(key)
        if captured is None or captured.changed():
            if captured is None and self.dynamic == "auto" and (form := form_of(args, kwargs, given)) is not None:
                with self._lock:
                    one = self._one_plan(form, args, kwargs, given)
                    if one is not None and one.captured is not None:
                        return one.run(given, form.lengths, _keys(one.captured.draws))
            captured, given = self._capture(key, args, kwargs, given)
        if captured.draws:
            given += _keys(captured.draws)
        return captured.run(given, values, sized=self.sized)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method: the object becomes the first argument and a part of the signature; captures keep it alive."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The plans captured so far: one per input signature, at most `MOST_PLANS`, then the plans with variable lengths."""
        ones = (one.captured for one in self._for_all_lengths.values() if one is not None)
        return tuple(c.plan for c in (*self._captured.values(), *ones) if c is not None)

    def _capture(self, key: Hashable, args: Any, kwargs: Any, given: list[Leaf]) -> tuple[Captured, list[Leaf]]:
        """Capture a call, unless another thread has done so; returns the capture and the arguments in memory."""
        with self._lock:
            captured = self._captured.get(key)
            changed = "" if captured is None else captured.changed()
            if captured is not None and not changed:
                return captured, given
            if changed:
                self._say_changed(key, changed)
            tensors = [in_memory(as_tensor(g)) for g in given]
            made = self._captured_with(args, kwargs, tensors)
            if captured is None and (form := form_of(args, kwargs, given)) is not None:
                advice = self._lengths.advice(self._name, self.fn, args, kwargs, self._lengths.note(form))
                if advice and self.dynamic == "tell":
                    log.warning("%s", advice)
            self._captured.pop(key, None)
            while len(self._captured) >= MOST_PLANS:
                del self._captured[next(iter(self._captured))]
            self._captured[key] = made
            return made, [t if isinstance(g, Tensor) else g for g, t in zip(given, tensors, strict=True)]

    def capture_apart(self, *args: Any) -> Captured:
        """Capture a call of a function that assigns to no tensor, beside other threads; the function does not keep the plan. Raises
        SvodError as `capture` does."""
        given: list[Leaf] = []
        for a in args:
            key_of(a, given, {})
        return self._captured_with(args, {}, [in_memory(as_tensor(g)) for g in given], apart=True)

    def _captured_with(self, args: Any, kwargs: Any, tensors: list[Tensor], apart: bool = False) -> Captured:
        return capture(self.fn, self._name, args, kwargs, tensors, self.config, self.random == "fresh", apart)

    def _one_plan(self, form: ArgumentsForm, args: Any, kwargs: Any, given: list[Leaf]) -> OnePlan | None:
        """The plan for all lengths of calls of this form, captured now if needed; None if these lengths need a plan of their own."""
        one = self._for_all_lengths.get(form.frame)
        if form.frame in self._for_all_lengths and one is None:
            return None
        if one is not None and one.captured is not None and one.holds(form.lengths) and not one.captured.changed():
            return one
        differing = self._lengths.note(form)
        if not differing:
            return None
        made = OnePlan(len(self._for_all_lengths), form, differing)
        if not made.holds(form.lengths):
            return None
        try:
            usable = made.capture(self._captured_with, args, kwargs, given)
        except SvodError as error:
            log.info("svod.jit: %s has a plan for each length: %s", self._name, error)
            usable = False
        self._for_all_lengths[form.frame] = made if usable else None
        return made if usable else None

    def _say_changed(self, key: Hashable, changed: str) -> None:
        """Count a capture that a changed value made necessary; warn once after `RECAPTURES_SAID`."""
        self._renewed[key] = self._renewed.get(key, 0) + 1
        if self._renewed[key] == RECAPTURES_SAID:
            log.warning("svod.jit: %s was captured %d times for one signature, the last time because of %s; pass what changes often as an "
                        "argument", self._name, RECAPTURES_SAID + 1, changed)

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)


def _keys(draws: int) -> list[Leaf]:
    """The random keys of a run that draws `draws` times, as its plan's last argument; empty if it draws none."""
    return [np.array(next_keys(draws), np.uint32)] if draws else []


def _check_arguments(fn: Any, config: Any, random: str, dynamic: str) -> None:
    """Raise ArgumentError or ConfigError for invalid arguments of `svod.jit`."""
    if not callable(fn):
        hint = "; to compute a tensor, call its realize()" if isinstance(fn, Tensor) else ""
        raise ArgumentError(f"svod.jit takes a function of tensors, got {type(fn).__name__}{hint}")
    if any(c.__module__.split(".")[0] == "torch" for c in type(fn).__mro__):
        raise ArgumentError(f"svod.jit takes a function of svod tensors, got the PyTorch module {type(fn).__name__}; write it with svod.nn "
                            "and load its weights: model.load_state_dict(module.state_dict())")
    if config is not None and not isinstance(config, PrepareConfig):
        raise ConfigError(f"svod.jit(config=…) takes a PrepareConfig, got {type(config).__name__}; for a search: "
                          "PrepareConfig(beam=BeamConfig(width=4))")
    if random not in ("captured", "fresh"):
        raise ArgumentError(f"svod.jit(random={random!r}): use \"captured\" or \"fresh\"")
    if dynamic not in ("tell", "auto", "never"):
        raise ArgumentError(f"svod.jit(dynamic={dynamic!r}): use \"tell\", \"auto\" or \"never\"")


def jit(fn: Callable[..., Any] | None = None, *, config: PrepareConfig | None = None,
        random: Literal["captured", "fresh"] = "captured", dynamic: Literal["tell", "auto", "never"] = "tell") -> Any:
    """Capture a function of tensors: `f = svod.jit(model)`, or as a decorator, `@svod.jit` or `@svod.jit(config=…)`.

    Arguments may be arrays and tensors of NumPy, svod, and libraries with `__dlpack__` or an array interface (PyTorch, JAX), and tuples,
    lists and dicts of them. A bound variable may be an argument, `f(x, n.bind(5))`, or an extent of one, `f(x[:n.bind(5)])`; its
    value may differ in each call. Everything else must be hashable and is a constant of the signature. Every call returns new tensors.

    Changes of values that the function reads besides its arguments are detected: weights that are replaced, loaded or assigned to, names,
    attributes. The next call then captures again. A NumPy array that it reads becomes read-only while the capture lives.

    A tensor that the function assigns to (`state.assign(…)`) is state: every call reads and writes its memory, also if it is an argument.
    Reading the value of an argument during capture (`x.item()`, `if x.sum() > 0`) is an error. A jitted function that is called during the
    capture of another becomes a part of the other.

    `random`: "captured" draws random tensors (`Tensor.rand` and others) once, at capture, and every call returns the same numbers; "fresh"
    draws new numbers in each call, the same ones as without jit.

    `dynamic`: how to treat lengths that differ from call to call; without variables, each combination has its own plan. "tell" warns
    after a few and names the variable to declare. "auto" turns differing lengths into variables from the second combination on: one plan
    serves all of them, and arguments are copied to its layout; functions that depend on the number itself keep a plan per length. "never"
    does not warn.

    The last `MOST_PLANS` (64) plans are kept, one per signature.

    Raises ArgumentError unless `fn` is a function. A call raises SvodError if the function returns no tensor."""
    if fn is None:
        return lambda f: Jit(f, config, random, dynamic)
    return Jit(fn, config, random, dynamic)
