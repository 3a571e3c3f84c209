"""The user's settings for running a PyTorch model: `torch.compile(…, backend="svod", mode=…, options={…})`."""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from svod.compile.backend import device_named
from svod.config import BeamConfig, PrepareConfig
from svod.errors import ConfigError

# the modes of torch.compile; True: kernels are searched
MODES = {"default": False, "reduce-overhead": False, "max-autotune": True, "max-autotune-no-cudagraphs": True}

OWN_OPTIONS = {
    "beam": "the width of the search of kernels that the database does not know; 0: none",
    "strict": "an operation that svod lacks is an error, which lists all of them; so is any other graph that PyTorch would have to run",
    "freeze": "weights are constants, packed once; False: they are read anew in every run",
}
_SEARCH = {f.name for f in fields(BeamConfig)} - {"width", "debug", *OWN_OPTIONS}
_PREPARE = {f.name for f in fields(PrepareConfig)} - {"optimizer", *OWN_OPTIONS}


@dataclass(frozen=True)
class Settings:
    """The settings of a model's runs."""

    config: PrepareConfig | None = None       # None: from the environment
    strict: bool = False
    freeze: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)      # the options that the user gave, for reports

    @classmethod
    def of(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Settings:
        """The settings of a mode and of options by name: the keys of `OWN_OPTIONS`, and the fields of PrepareConfig and BeamConfig.

        Raises ConfigError, which names all modes or options, for an unknown one; UnsupportedError for a device without a backend, and
        DeviceError for a device that this machine lacks."""
        if mode is not None and mode not in MODES:
            raise ConfigError(f"mode={mode!r} is not one of svod's: {', '.join(MODES)}")
        given = dict(options or {})
        unknown = sorted(given.keys() - OWN_OPTIONS.keys() - _SEARCH - _PREPARE)
        if unknown:
            known = [*OWN_OPTIONS, *_SEARCH, *_PREPARE]
            near = [n for u in unknown for n in difflib.get_close_matches(str(u), known, 1, 0.7)]
            hint = f" (is it {', '.join(near)}?)" if near else ""
            raise ConfigError(f"no option is called {', '.join(map(repr, unknown))}{hint}; there are {', '.join(OWN_OPTIONS)}; of "
                              f"BeamConfig {', '.join(sorted(_SEARCH))}; of PrepareConfig {', '.join(sorted(_PREPARE))}")
        for name in ("strict", "freeze"):
            if not isinstance(given.get(name, True), bool):
                raise ConfigError(f"{name}={given[name]!r}: give True or False")
        if given.get("device") is not None:
            backend = device_named(given["device"]).backend
            backend.target()        # raises if the device is missing
            backend.check_runs()
        search = {k: given[k] for k in given.keys() & _SEARCH}
        searches = "beam" in given or bool(search) or MODES.get(mode or "default", False)
        prepared = {k: given[k] for k in given.keys() & _PREPARE}
        config = None
        if searches or prepared:
            base = PrepareConfig.of_environment()
            beam = BeamConfig(**({"width": given["beam"]} if "beam" in given else {}), **search) if searches else base.beam
            config = replace(base, beam=beam, **prepared)
        return cls(config, bool(given.get("strict", False)), bool(given.get("freeze", True)), {**given, **({"mode": mode} if mode else {})})
