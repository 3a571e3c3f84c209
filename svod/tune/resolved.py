"""The objects that a configuration names, looked up once, when `prepare` begins.

    PrepareConfig → device → target → compiler
                  → the tuning database, the lines of the lock file

`prepare` passes the resulting `Resolved` on to all code that it calls. A plan that runs on several devices has one `Resolved` for each
(`Resolved.on`); they differ only in their compilers.
"""
from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from svod.compile.backend import device_named
from svod.compile.plan.compiler import Chain, Compiler, compiler_for
from svod.config import NONE, PrepareConfig, log_once
from svod.core.kernel.chain_text import chain_of
from svod.core.machine.target import FAST, FLOAT32, HOST, SAME, Target
from svod.errors import ConfigError, UnsupportedError
from svod.system.forksafe import remake_after_fork
from svod.tune.db import TuningDB
from svod.tune.lock import Lock, Locked, LockedRounding, LockedTimes, read_lock

log = logging.getLogger("svod")

_databases: dict[tuple[bool, str | None], TuningDB] = {}
_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


@dataclass(frozen=True)
class Resolved:
    """A configuration with the objects that it names.

    config       the options; every option that the environment may set has its value
    compiler     the compiler for the device that runs the graph's CPU nodes, under the options' limits: `threads`, `optimizer`
    db           the tuning database; an empty one where the options say that none is consulted
    locked       the chains of the lock file by (kernel, target); none without a lock file
    opts         the chains of the option `opts`, by the names that it gives kernels
    roundings    the choices of kernels to round of the lock file
    times        the times of convolutions and of plans of the lock file
    """

    config: PrepareConfig
    compiler: Compiler
    db: TuningDB
    locked: Mapping[tuple[str, str], Locked]
    opts: Mapping[str, Chain] = field(default_factory=dict)
    roundings: Sequence[LockedRounding] = ()
    times: Sequence[LockedTimes] = ()

    @classmethod
    def of(cls, config: PrepareConfig, target: Target, db: TuningDB) -> Resolved:
        """A configuration with a target and a database that the caller has looked up already. Raises ConfigError for an unknown pass to
        dump, KernelOptError for an entry of `opts` that is not a valid chain."""
        if config.dump_after is not None:
            from svod.compile.plan.dump import passes_of  # imported here, as it imports all that renders passes and few programs dump any
            passes_of(config)
        lock = Lock() if config.lock is None or config.noopt else read_lock(config.lock)
        opts = {name: chain_of(given) for name, given in config.opts.items()}
        return cls(config, compiler_for(target, config), db, lock.chains, opts, lock.roundings, lock.times)

    @property
    def target(self) -> Target:
        return self.compiler.target

    @property
    def exact(self) -> Resolved:
        """The same configuration with the policy "float32" instead of "fast", without the lines that the lock file has for "fast"."""
        if self.target.numerics != FAST:
            return self
        config = replace(self.config, numerics=FLOAT32, max_error=None)
        locked = {at: line for at, line in self.locked.items() if line.target != self.target.key}
        return replace(self, config=config, compiler=compiler_for(replace(self.target, numerics=FLOAT32), config), locked=locked,
                       roundings=())

    def target_of(self, device: str) -> Target:
        """The target of `device`, under the limits of the options `threads` and `optimizer`. Raises UnsupportedError for an unknown
        device."""
        return _target(device, self.config)

    def on(self, device: str) -> Resolved:
        """The same configuration and database, with the compiler for the device that graphs call `device`."""
        return self if device == self.target.device else replace(self, compiler=compiler_for(self.target_of(device), self.config))


def resolve(config: PrepareConfig) -> Resolved:
    """Look up the objects that a configuration names. Raises UnsupportedError for an unknown device or one without the policy
    `numerics`, DeviceError for one that cannot be used, ConfigError for an unknown pass to dump, KernelOptError for an entry of `opts` that
    is not a valid chain."""
    return Resolved.of(config, _target(config.device or HOST, config), database(config))


def _target(device: str, config: PrepareConfig) -> Target:
    target = device_named(device).backend.target(config.threads).allowing(*config.allowed)
    if target.numerics == SAME and target.has_groups:
        raise UnsupportedError(f"numerics={SAME!r} is for CPUs: on {device} the threads of a group share sums in no order that is kept")
    if target.numerics == FAST and target.has_groups:
        raise UnsupportedError(f"numerics={FAST!r} is for CPUs: on {device} there are no kernels with rounded factors to choose from yet")
    if config.max_error is not None and target.numerics != FAST:
        raise ConfigError(f"max_error={config.max_error:g} (SVOD_MAX_ERROR) is the limit of numerics={FAST!r}; the policy is "
                          f"{target.numerics!r}, which rounds no factors")
    return target


def database(config: PrepareConfig) -> TuningDB:
    """This process's handle of the tuning database that a configuration names; a handle of an empty one where it consults none."""
    key = config.consults_database, config.db
    with _lock:
        db = _databases.get(key)
        if db is None:
            db = _databases[key] = TuningDB.open(config.db if config.consults_database else NONE)
            if config.db is not None and config.beam is None:       # a search would create the file
                _tell_missing(db)
        return db


def _tell_missing(db: TuningDB) -> None:
    """Warn that the named database does not exist: its path may be relative and meant for another working directory."""
    file = db.plan.write
    if file is not None and not any(os.path.exists(f) for f in (file, *db.plan.read) if isinstance(f, Path)):
        log_once(log, logging.WARNING, f"there is no tuning database {file}, which SVOD_TUNE_DB or db= names")
