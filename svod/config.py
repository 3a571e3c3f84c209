"""Every option of svod, declared once; the only module that reads the environment.

An option is a field of one of four frozen dataclasses. Its declaration (`_option`) holds the environment variable, the default, the
accepted values and the help text. docs/generate.py makes docs/generated/options.md from these declarations.

svod warns once about an unknown variable with its prefix, such as `SVOD_TUNEDB`, and names the most similar option.

An unset or empty variable means the default. An unusable value raises `ConfigError`, which names the variable, the value and the
accepted values. The same checks apply to values given in Python; the error then names the field. A variable is read only if the program
needs its option and does not set it: `BEAM=abc` is no error in a program that does not search.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from svod.errors import ConfigError
from svod.system.process import directories
from svod.system.quantities import accepted_numbers, kind_of_number

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("svod.config")

NUMERICS = ("same", "float32", "fast")     # policies of results: `POLICIES` in svod/core/machine/target.py
STRATEGIES = ("beam", "evolve", "random", "optuna")
NONE = ":none:"  # value of options that turns off a database or a cache directory

T = TypeVar("T")
Chain = tuple[tuple[Any, ...], ...]


# -- values that an option accepts --------------------------------------------------------------------------------------

class Accept(NamedTuple):
    """The values that an option accepts. `parse` converts text and raises ValueError if it cannot; `check` tells whether a value is
    accepted."""

    description: str
    parse: Callable[[str], Any]
    check: Callable[[Any], bool]


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_number(v: Any) -> bool:
    return (_is_int(v) or isinstance(v, float)) and v == v and v != float("inf")


def _integer(low: int, *, none: bool = False) -> Accept:
    return Accept(accepted_numbers("an integer", low), int, lambda v: (none and v is None) or (_is_int(v) and v >= low))


def _number(low: float, unit: str, *, none: bool = False) -> Accept:
    return Accept(accepted_numbers(kind_of_number(unit), low), float, lambda v: (none and v is None) or (_is_number(v) and v >= low))


_LEVEL = _integer(0, none=True)
_LEVEL_OR_TEXT = _LEVEL._replace(description=f"{_LEVEL.description} (text that begins like no number is meant for other programs and "
                                             "counts as 0)",
                                 parse=lambda text: int(text) if text.lstrip("+-.")[:1].isdecimal() else 0)


_SWITCH_WORDS = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}


def _parse_switch(text: str) -> bool:
    if text.lower() not in _SWITCH_WORDS:
        raise ValueError(text)
    return _SWITCH_WORDS[text.lower()]


_SWITCH = Accept("0 or 1 (also true/false, yes/no, on/off)", _parse_switch, lambda v: isinstance(v, bool))
_OPEN_SWITCH = _SWITCH._replace(check=lambda v: v is None or isinstance(v, bool))
_TEXT = Accept("text", str, lambda v: v is None or isinstance(v, str))
_PATH = Accept("a path", directories.from_start, lambda v: v is None or isinstance(v, (str, os.PathLike)))
_DIRECTORIES = Accept(f"directories joined as in PATH, or {NONE}", lambda t: NONE if t in ("0", NONE) else directories.paths_from_start(t),
                      _PATH.check)
_DATABASES = Accept(f"paths joined as in PATH, or {NONE}", lambda t: t if t == NONE else directories.paths_from_start(t),
                    lambda v: v is None or isinstance(v, str))


def _choice(*names: str, none: bool = False) -> Accept:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(text)
        return text.lower()
    return Accept("one of " + ", ".join(names), parse, lambda v: (none and v is None) or v in names)


def _parse_strict(text: str) -> str:
    if text.lower() in ("0", "no", "off", "false"):
        return ""
    if text.lower() != "reference":
        raise ValueError(text)
    return "reference"


_STRICT = Accept("reference, or 0", _parse_strict, lambda v: v in ("", "reference"))


def _is_chain(v: Any) -> bool:
    if isinstance(v, str):
        return True     # the chain is parsed, and errors in it reported, when a kernel uses it
    return isinstance(v, (list, tuple)) and all(isinstance(o, (list, tuple)) and o and isinstance(o[0], str) for o in v)


# -- declaring and reading options --------------------------------------------------------------------------------------

class Option(NamedTuple):
    """The declaration of one option; docs/generated/options.md shows it."""

    variable: str | None
    accept: Accept
    help: str


def _option(variable: str | None, default: Any, accept: Accept, help: str, *, default_env: Any = MISSING) -> Any:
    """Make a dataclass field that carries an option's declaration. `default_env`: the option's value in `from_env` if the variable is
    unset; if missing: `default`."""
    metadata = {"option": Option(variable, accept, help)}
    if default_env is not MISSING:
        metadata["default_env"] = default_env
    return field(default=default, metadata=metadata)


def _read_variable(name: str, accept: Accept, default: Any) -> Any:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = accept.parse(text)
    except ValueError:
        value = None
    if value is None or not accept.check(value):
        unset = "" if default is None or default == "" else f" ({_show(default)} where it is unset)"
        raise ConfigError(f"{name}={text!r} is not usable; accepted: {accept.description}{unset}")
    return value


def _show(value: Any) -> str:
    return "not set" if value is None or value == "" else str(int(value)) if isinstance(value, bool) else f"{value}"


class _Config:
    """Base class of the four configurations; checks values and reads the environment."""

    __slots__ = ()

    def __new__(cls, *args: Any, **given: Any) -> Self:
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in names:
                raise ConfigError(f"{cls.__name__} has no option {name!r}; it has {', '.join(names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            option: Option | None = f.metadata.get("option")
            value = getattr(self, f.name)
            if option is not None and not option.accept.check(value):
                raise ConfigError(f"{type(self).__name__}({f.name}={value!r}) is not usable; accepted: {option.accept.description}")

    @classmethod
    def env_value(cls, name: str) -> Any:
        """Return the value of one option from the environment. Raises ConfigError for an unusable value."""
        f = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        option: Option = f.metadata["option"]
        assert option.variable is not None, f"{name} has no variable"
        return _read_variable(option.variable, option.accept, f.metadata.get("default_env", f.default))

    @classmethod
    def _env_values(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of `given`, and the environment's values of all other options that have a variable."""
        options = {f.name: f.metadata.get("option") for f in fields(cls)}  # type: ignore[arg-type]
        return {**given, **{name: cls.env_value(name) for name, o in options.items() if name not in given and o is not None and o.variable}}

    @classmethod
    def from_env(cls, **given: Any) -> Self:
        """Return the configuration that the environment describes; `given` options replace its values. Raises ConfigError for a variable
        with an unusable value."""
        return cls(**cls._env_values(given))


# -- the options --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class OptimizerConfig(_Config):
    """Options of the optimisation of a kernel without a search, and the kinds of opts that are allowed with and without one."""

    noopt: bool = _option("SVOD_NOOPT", False, _SWITCH, "run every kernel without any opt; wins over BEAM and the database")
    nolocals: bool = _option("NOLOCALS", False, _SWITCH, "groups of one thread: no LOCAL and no GROUP; CPUs have no groups")
    tc: bool = _option("TC", True, _SWITCH, "0: no dot or matrix instructions; tuned chains that use them are not looked up")
    tf32: bool = _option("TF32", False, _SWITCH, "1: matrix instructions may round factors of float32 to 11 significant bits, where the "
                         "target has such instructions (NVIDIA's TF32)")

    @property
    def allowed(self) -> tuple[bool, bool, bool]:
        """Whether opts may use dot and matrix instructions, groups of several threads, and instructions that round factors of float32: the
        arguments of `Target.allowing`."""
        return self.tc, not self.nolocals, self.tf32


@dataclass(frozen=True)
class BeamConfig(_Config):
    """The BEAM search of one kernel. `width` 0 turns the search off. Each help text names the unit of its time."""

    width: int = _option("BEAM", 4, _integer(0), "beam width; 0: no search", default_env=0)
    upcast_max: int = _option("BEAM_UPCAST_MAX", 256, _integer(1), "most values side by side in registers, vector lanes divided out")
    local_max: int = _option("BEAM_LOCAL_MAX", 1024, _integer(1), "most threads of a group; CPUs have no groups")
    uops_max: int = _option("BEAM_UOPS_MAX", 3000, _integer(0), "longest LINEAR of a candidate; 0: no limit")
    runs: int = _option("BEAM_RUNS", 3, _integer(1), "timed runs of a candidate that passed the first sample")
    min_progress: float = _option("BEAM_MIN_PROGRESS", 0.01, _number(0, "µs"), "a round that gains less counts as no gain, in µs")
    timeout_sec: float = _option("BEAM_TIMEOUT_SEC", 10.0, _number(0.001, "seconds"), "longest compilation of one candidate, in seconds")
    budget: float = _option("BEAM_BUDGET", 60.0, _number(0, "seconds"), "search time of a process at prepare time, all kernels, in seconds")
    kernel_budget: float = _option("BEAM_KERNEL_BUDGET", 40.0, _number(0, "seconds"), "search time of one kernel, in seconds")
    patience: int = _option("BEAM_PATIENCE", 2, _integer(1), "rounds without a gain before a search stops")
    round_size: int = _option("BEAM_ROUND_SIZE", 10, _integer(1), "candidates a round takes for each place in the beam")
    padto: bool = _option("BEAM_PADTO", False, _SWITCH, "PADTO(axis, 32) in the reference grid")
    actions: str = _option("BEAM_ACTIONS", "default", _choice("default", "reference"), "the grid of single opts that is proposed")
    sketches: bool = _option("BEAM_SKETCHES", True, _SWITCH, "start from sketches and the heuristic's chain; 0: from the untouched kernel")
    mutations: bool = _option("BEAM_MUTATIONS", True, _SWITCH, "propose changes within a chain; 0: only opts that are added to it")
    strategy: str = _option("BEAM_STRATEGY", "beam", _choice(*STRATEGIES), "who proposes candidates")
    cost_model: str = _option("BEAM_COST_MODEL", "analytic", _choice("analytic", "learned"), "by which prediction proposals are ranked")
    optuna_storage: str = _option("BEAM_OPTUNA_STORAGE", "", _TEXT, "URL of a storage that mirrors the studies of the strategy optuna")
    strict: str = _option("BEAM_STRICT", "", _STRICT, "reference: the grid, order and stop rule of the reference systems")
    executor: str = _option("BEAM_EXECUTOR", "local", _choice("local", "ray", "inline"), "who compiles and times candidates")
    workers: int = _option("BEAM_WORKERS", 0, _integer(0), "child processes of the local executor; 0: one per usable core")
    seed: int = _option("BEAM_SEED", 0, _integer(0), "seed of everything random in a search")
    ignore_cache: bool = _option("IGNORE_BEAM_CACHE", False, _SWITCH, "search as if the tuning database were empty; still record")
    debug: int = _option("BEAM_DEBUG", 0, _integer(0), "1: print each round of a search; 2: what became of each candidate too")
    log_surpass_max: bool = _option("BEAM_LOG_SURPASS_MAX", False, _SWITCH,
                                    "print the candidates that a limit of the search drops, with the reason; of long ones the operations")

    def __post_init__(self) -> None:
        _Config.__post_init__(self)
        if self.strict and self.strategy != "beam":
            raise ConfigError(f"BeamConfig(strict={self.strict!r}, strategy={self.strategy!r}) is not usable: the reference systems' rules "
                              "are those of a beam")


@dataclass(frozen=True)
class BenchConfig(_Config):
    """The timing protocol of decisive measurements: the confirmation of a search's results, and svod-bench."""

    rounds: int = _option("SVOD_BENCH_ROUNDS", 15, _integer(3),
                          "least interleaved rounds of a comparison; of long kernels a search may take fewer, six at least")
    seconds: float = _option("SVOD_BENCH_SECONDS", 3.0, _number(0, "seconds"), "most seconds of the confirmation of a kernel")
    case_seconds: float = _option("SVOD_BENCH_CASE_SECONDS", 15.0, _number(0, "seconds"), "most seconds of a kernel of svod-bench")
    precision: float = _option("SVOD_BENCH_PRECISION", 0.01, _number(0, ""),
                               "stop when the 95 % interval of the paired ratio is this narrow")
    min_sample: float = _option("SVOD_BENCH_MIN_SAMPLE", 200.0, _number(0, "µs"), "shortest sample, in µs; shorter kernels are repeated")


@dataclass(frozen=True)
class PrepareConfig(_Config):
    """The preparation of a graph into an execution plan.

    `beam` None: kernels without records in the database get the heuristic's chain. A width of 0 or `optimizer.noopt` set it to None.
    `constants`: "auto": tensors that a function under `svod.jit` closes over are weights of its plan, which are folded and rearranged once;
    "none": they are read again in every run. A plan of `Tensor.prepare` has only the constants that its caller names: its other inputs may
    be rewritten between runs. `opts` maps a kernel's name in the plan ("gemm_0"), its key, or the beginning of its key to a chain, which
    has priority over all other sources of chains. A chain is text as `DEBUG=2` prints it, "UPCAST(o0, 8) LANES(o1.in)", or a sequence of
    [op, axis, argument].
    """

    beam: BeamConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    device: str | None = _option("SVOD_DEVICE", None, _TEXT, "the default device; not set: CPU. CPU:interpreter runs kernels instruction "
                                 "by instruction in NumPy, to find out whether a wrong number is the compiler's")
    threads: int | None = _option("SVOD_THREADS", None, _integer(1, none=True),
                                  "most cores a kernel may use; not set: the affinity mask and the cgroup quota decide")
    numerics: str | None = _option("SVOD_NUMERICS", None, _choice(*NUMERICS, none=True), "how results may differ from chain to chain: "
                                   "float32: by the order of sums, and by the larger errors of WINOGRAD (docs/opts.md); same: not at all, "
                                   "so that every winner, number of threads and batch computes the same bits (docs/numerics.md); fast: "
                                   "products of float32 may round their factors, within max_error; not set: float32")
    max_error: float | None = _option("SVOD_MAX_ERROR", None, _number(0, "", none=True), "with numerics=fast: the largest "
                                      "error of an output, over the largest value of that output in float32; a plan without a stored "
                                      "choice that keeps it chooses the kernels to round after its first run, by the inputs of that run; "
                                      "not set: a stored choice is used, and nothing is chosen")
    db: str | None = _option("SVOD_TUNE_DB", None, _DATABASES,
                             "tuning databases; the first is written, all are read; not set: the user's data directory")
    imported: str = _option("SVOD_IMPORTED", "check", _choice("check", "trust", "ignore"),
                            "chains that were not measured here, of others' records: check: measured when they are first needed, and used "
                            "where they are right and no slower than the heuristic; trust: used as they are; ignore: not used")
    transfer: bool = _option("SVOD_TRANSFER", True, _SWITCH, "a kernel that the database does not know tries the chains of its relatives, "
                             "and uses the best that is measured to be faster than the heuristic")
    similar_targets: bool = _option("SVOD_SIMILAR_TARGETS", False, _SWITCH,
                                    "the same kernel on a target with the same instructions and caches, and other threads, is such a "
                                    "relative as well")
    check_budget: float = _option("SVOD_CHECK_BUDGET", 10.0, _number(0, "seconds"), "most seconds of a process that measure such chains "
                                  "at prepare time; what is left over keeps the heuristic, and is measured by a later process")
    lock: str | None = _option("SVOD_LOCK", None, _PATH, "a lock file of svod-tune -o, whose chains go before the tuning database's")
    constants: str = _option("SVOD_CONSTANTS", "auto", _choice("auto", "none"),
                             "auto: what a function under svod.jit closes over, and the tensors of prepare(constants=[…]), are weights "
                             "of the plan; none: nothing is")
    transformed_mb: float | None = _option("SVOD_TRANSFORMED_MB", None, _number(0, "MB", none=True), "most MB by which algorithms may make "
                                           "the constants of a plan larger (WINOGRAD, docs/opts.md, and convolutions by transforms, "
                                           "docs/from_tensor_to_machine.md); kernels beyond compute directly; not set: no limit")
    memory_planner: str = _option("SVOD_MEMORY_PLANNER", "arena", _choice("arena", "remap", "disabled"),
                                  "how intermediates share memory: packed into one arena, slots of equal size, or not at all")
    first_forms: bool | None = _option("SVOD_FIRST_FORMS", None, _OPEN_SWITCH, "a plan of many kernels or large constants that are not "
                                       "compiled yet begins with first forms of them, which are found and compiled sooner, and changes to "
                                       "their own forms when these are compiled in the background; sizes that take much of the time may "
                                       "get a plan of their own; not set: 1, and 0 for a plan that is searched or observed; 0: every run "
                                       "computes the same bits")
    disable_schedule_cache: bool = _option("SVOD_DISABLE_SCHEDULE_CACHE", False, _SWITCH,
                                           "cut and analyse the kernels of every graph anew, whatever this process has seen before")
    opt_cache_max: int = _option("SVOD_OPT_CACHE_MAX", 4096, _integer(1), "compiled kernels kept in memory; the first in goes first")
    object_cache: str | None = _option("SVOD_OBJECT_CACHE", None, _DIRECTORIES,
                                       f"directories of compiled objects: the first is filled, all are read; {NONE} or 0: no such cache; "
                                       "not set: the user's cache directory")
    capture: str | None = _option("SVOD_CAPTURE", None, _PATH,
                                  "append the kernels of every prepare to files in this directory; nothing is searched")
    capture_device: str | None = _option("SVOD_CAPTURE_DEVICE", None, _TEXT,
                                         "the device whose kernels are captured, where another one runs the program")
    debug: int | None = _option("DEBUG", None, _LEVEL_OR_TEXT,
                                "what to print of every plan: 1 its kernels, 2 their loops, 3 their ASTs, 4 LINEAR, from 5 on LLVM IR")
    dump_after: str | None = _option("SVOD_DUMP_AFTER", None, _TEXT, "passes after which every plan is printed, with commas; "
                                     "see docs/debugging.md")
    profile: int | None = _option("SVOD_PROFILE", None, _LEVEL, "time every kernel of every run: 1 prints a table when the program ends, "
                                  "from 2 on each kernel as it runs as well; kernels then run one after the other")
    trace: str | None = _option("SVOD_TRACE", None, _PATH,
                                "write the kernels and copies of every run with their times to this file, for chrome://tracing and "
                                "Perfetto")
    perf_map: bool | None = _option("SVOD_PERF_MAP", None, _OPEN_SWITCH, "name compiled kernels in /tmp/perf-PID.map, which perf reads")
    opts: Mapping[str, Chain | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam is not None and not isinstance(self.beam, BeamConfig):
            raise ConfigError(f"PrepareConfig(beam={self.beam!r}) is not usable; accepted: BeamConfig(width=…), or None for no search")
        if not isinstance(self.optimizer, OptimizerConfig):
            raise ConfigError(f"PrepareConfig(optimizer={self.optimizer!r}) is not usable; accepted: OptimizerConfig(…)")
        if not isinstance(self.opts, Mapping) or not all(isinstance(k, str) and _is_chain(v) for k, v in self.opts.items()):
            raise ConfigError(f"PrepareConfig(opts={self.opts!r:.80}) is not usable; accepted: chains by kernel key or name, as "
                              "in {'gemm_0': 'UPCAST(o0, 8)'} or {'1e0aeffe': [('UPCAST', 'o0', 8)]}")
        if self.beam is not None and (self.beam.width == 0 or self.optimizer.noopt or self.capture is not None):
            object.__setattr__(self, "beam", None)

    @property
    def noopt(self) -> bool:
        return self.optimizer.noopt

    @property
    def allowed(self) -> tuple[bool, bool, bool, str]:
        """What opts may do, and how results may differ from chain to chain: the arguments of `Target.allowing`."""
        return (*self.optimizer.allowed, self.numerics or "float32")

    @property
    def consults_database(self) -> bool:
        """Whether chains are looked up in the tuning database: not with `noopt`, and not if kernels are captured."""
        return not self.noopt and self.capture is None

    @classmethod
    def from_env(cls, **given: Any) -> Self:
        """Return the configuration that the environment describes; `given` options replace its values. BEAM turns a search on, unless
        SVOD_NOOPT or SVOD_CAPTURE turns it off."""
        _warn_of_unknown_variables()
        values = cls._env_values(given)
        if "beam" not in given:
            values["beam"] = BeamConfig.from_env()
        if "optimizer" not in given:
            values["optimizer"] = OptimizerConfig.from_env()
        return cls(**values)

    @classmethod
    def of_environment(cls) -> PrepareConfig:
        """Return `from_env()`; the same object as long as the environment does not change."""
        global _latest
        environment = dict(_raw_environment())
        if _latest is None or _latest[0] != environment:
            _latest = environment, PrepareConfig.from_env()
        return _latest[1]

    def in_environment(self) -> Self:
        """Return this configuration with the environment's values in fields that are None, except `beam`. SVOD_CAPTURE and SVOD_NOOPT
        override fields that are set: a script that is being captured searches nothing."""
        _warn_of_unknown_variables()
        open_ones = ("numerics", "max_error", "db", "lock", "threads", "object_cache", "device", "capture_device", "debug", "dump_after",
                     "profile", "trace", "perf_map", "first_forms")
        changes = {name: self.env_value(name) for name in open_ones if getattr(self, name) is None}
        if (capture := self.env_value("capture")) is not None:
            changes["capture"] = capture
        if OptimizerConfig.env_value("noopt"):
            changes["optimizer"] = OptimizerConfig.from_env()
        return replace(self, **changes)


_latest: tuple[dict[Any, Any], PrepareConfig] | None = None  # the environment at the last call of `of_environment`, and its configuration


def _raw_environment() -> Mapping[Any, Any]:
    """Return the environment as os.environ stores it (encoded), if accessible: decoding every variable takes longer than a small kernel."""
    return getattr(os.environ, "_data", os.environ)


CONFIGS: tuple[type[_Config], ...] = (PrepareConfig, OptimizerConfig, BeamConfig, BenchConfig)


def unknown_variables() -> list[str]:
    """Return warnings about variables that look like options of svod but are none: every unknown SVOD_…, and a BEAM… that resembles one
    (other programs have variables with BEAM as well)."""
    known = {o.variable for c in CONFIGS for f in fields(c) if (o := f.metadata.get("option")) is not None and o.variable}  # type: ignore[arg-type]
    warnings = []
    for name in sorted(os.environ):
        if name in known or not name.startswith(("SVOD", "BEAM")):
            continue
        import difflib  # imported late: it takes 4 ms, and processes without such a variable do not need it

        near = difflib.get_close_matches(name, known, 1, 0.8)
        if near:
            warnings.append(f"the variable {name} is unknown and has no effect; {near[0]} is known")
        elif name.startswith("SVOD_"):
            warnings.append(f"the variable {name} is unknown and has no effect; docs/generated/options.md lists all")
    return warnings


def unknown_variables_once() -> list[str]:
    """Return `unknown_variables()` at the first call in this process, and an empty list afterwards."""
    global _environment_looked_at
    warnings = [] if _environment_looked_at else unknown_variables()
    _environment_looked_at = True
    return warnings


def _warn_of_unknown_variables() -> None:
    for message in unknown_variables_once():
        log.warning("%s", message)


_environment_looked_at = False


def default_threads() -> int | None:
    """Return the value of SVOD_THREADS, for callers without a PrepareConfig. None: no limit."""
    value: int | None = PrepareConfig.env_value("threads")
    return value


def child_environment(**changes: str | None) -> dict[str, str]:
    """Return the environment for a child process: this process's with `changes` applied; None removes a variable."""
    env = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def environment_with_svod(**changes: str | None) -> dict[str, str]:
    """Return the environment for a child process in Python that imports this svod, which may be a checkout: `child_environment`, with the
    folders of svod and its packages behind those of PYTHONPATH."""
    from svod.system.process.program import package_roots  # imported late: it imports the network's modules, which few processes need

    env = child_environment(**changes)
    roots = [root for root in package_roots() if Path(root).name not in ("site-packages", "dist-packages")]
    path = os.pathsep.join([*filter(None, [env.get("PYTHONPATH", "")]), *roots])
    return {**env, "PYTHONPATH": path} if path else env


@contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    """Set environment variables within the context, for libraries that are configured by the environment and processes started
    meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def default_environment(**defaults: str) -> Iterator[None]:
    """Set environment variables that the user has not set, within the context."""
    with changed_environment(**{name: value for name, value in defaults.items() if name not in os.environ}):
        yield


def set_default_environment(**defaults: str) -> None:
    """Set environment variables that the user has not set, for the rest of the process."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


# -- directories --------------------------------------------------------------------------------------------------------

LOCAL_DIR = Path(".svod")  # the directory used if the user's own ones cannot be written
_said: set[str] = set()


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` once per process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, "%s", message)


def _resolve_dir(wanted: Path | None, what: str, below: str = "") -> Path:
    """Return `wanted`, the user's own directory, if it can be written; otherwise `below` in ./.svod, which may not be writable either.
    Logs a warning once."""
    if wanted is not None and directories.is_writable(wanted):
        return wanted
    fallback = (directories.working_directory() or Path(os.sep)) / LOCAL_DIR / below
    kept, why = directories.is_writable(fallback), "this user has no home directory" if wanted is None else f"{wanted} cannot be written"
    log_once(log, logging.WARNING, f"{why}; {what} are kept in {fallback}" if kept else
             f"{why}, nor can {fallback} be written; {what} are not kept")
    return fallback


def data_dir() -> Path:
    """Return the directory of the tuning database: the user's data directory, or ./.svod if that cannot be written (logged once)."""
    return _resolve_dir(directories.user_data(), "svod's data (tuning database, figures of this machine)")


def object_cache_dirs(object_cache: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    """Return the directories of compiled objects for `PrepareConfig.object_cache`; (): no such cache."""
    if object_cache is not None:
        return () if os.fspath(object_cache) == NONE else tuple(map(Path, directories.split_paths(os.fspath(object_cache))))
    cache = directories.user_cache()
    return (_resolve_dir(None if cache is None else cache / "objects", "compiled objects", "objects"),)


# -- documentation ------------------------------------------------------------------------------------------------------

def options_table() -> str:
    """Return the table of all options, in Markdown, one section per dataclass."""
    out: list[str] = []
    for config in CONFIGS:
        out += [f"## {config.__name__}", "", "| variable | field | default | accepted | meaning |",
                "| --- | --- | --- | --- | --- |"]
        for f in fields(config):  # type: ignore[arg-type]
            option: Option | None = f.metadata.get("option")
            if option is None:
                continue
            default = _show(f.default)
            if "default_env" in f.metadata:
                default = f"{_show(f.metadata['default_env'])} ({default} in Python)"
            out.append(f"| {f'`{option.variable}`' if option.variable else ''} | `{f.name}` | {default} | {option.accept.description} "
                       f"| {option.help} |")
        out.append("")
    return "\n".join(out)
