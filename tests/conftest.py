"""Isolates the tests from the user's settings and databases and from the records that ship with svod: variables are unset, compiled objects
are kept for the session only, and ceilings are an example's."""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from svod.compile.backend import device_named
from svod.config import CONFIGS
from svod.tune.db import layers
from tests import draws
from tests.bench.stored_ceilings import store_ceilings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests, too; they run anyway where files are named, or with -m")
    parser.addoption("--random-plans", type=int, default=12, metavar="N", help="random graphs that run through the whole pipeline (12)")
    parser.addoption("--device", metavar="NAME", help="the device of tests that name none, such as WEBGPU (CPU); made for tests/tensor")
    parser.addoption("--draws", type=float, metavar="X",
                     help=f"random tests draw X times as many examples (1; {draws.FEW} where slow tests are left out)")
    parser.addoption("--chains", type=float, default=10.0, metavar="N",
                     help="random chains of opts for each kernel of the corpus, over all backends together (10)")
    parser.addoption("--update-goldens", action="store_true", help="write the generated code of tests/compile/goldens anew")


def is_fast(config: pytest.Config) -> bool:
    """Whether slow tests are left out: where neither files nor marks are named."""
    return not (config.option.all or config.option.markexpr) and config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_configure(config: pytest.Config) -> None:
    draws.SCALE, draws.CHAINS = config.getoption("--draws") or (draws.FEW if is_fast(config) else 1.0), config.getoption("--chains")
    # a busy machine is normal, so the duration of an example is not checked
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=draws.count(100))
    settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects without the garbage collector, and has it pass over what is there by then: modules and tests, which stay to the end."""
    gc.disable()
    try:
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            import_in_turns(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def import_in_turns(config: pytest.Config) -> None:
    """Import the modules with tests, each worker beginning at another one.

    pytest rewrites the assertions of a module where it is first imported, which takes most of the time of a collection, and stores the
    result. Workers that begin apart find what another has stored, instead of rewriting each module at the same time.
    """
    worker = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    files = sorted((config.rootpath / "tests").rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):     # an error is raised again where the module is collected
            importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_fast(config):
        return
    slow = [i for i in items if i.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [i for i in items if not i.get_closest_marker("slow")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_plan" in metafunc.fixturenames:
        metafunc.parametrize("random_plan", range(metafunc.config.getoption("--random-plans")))
    if "symbolic_plan" in metafunc.fixturenames:        # the test is run once for each kind of plan
        metafunc.parametrize("symbolic_plan", range(-(-metafunc.config.getoption("--random-plans") // 6)))


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """For the session and the processes that tests start: signals end them, also in the background of a shell and under nohup."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)      # type: ignore[arg-type]
    variables = {o.variable for c in CONFIGS for f in dataclasses.fields(c)  # type: ignore[arg-type]
                 if (o := f.metadata.get("option")) is not None and o.variable is not None}
    with pytest.MonkeyPatch.context() as patch:
        for name in variables:
            patch.delenv(name, raising=False)
        # Under this variable each process that a test starts would compile svod anew, which takes a second of processor time.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        if device := request.config.getoption("--device"):
            device_named(device).backend.target()       # raises an error that names the missing device
            patch.setenv("SVOD_DEVICE", device)
        patch.setenv("SVOD_TUNE_DB", ":none:")
        patch.setenv("SVOD_FIRST_FORMS", "0")       # a test would find one form or the other
        patch.setattr(layers, "shipped_files", lambda: ())      # a search must not get seeds that depend on the machine's kind
        patch.setenv("SVOD_OBJECT_CACHE", str(tmp_path_factory.mktemp("objects")))
        # Of a machine that is busy with tests, ceilings would be measured again wherever one is asked for. All workers have one directory.
        base = tmp_path_factory.getbasetemp()
        data = (base.parent if hasattr(request.config, "workerinput") else base) / "data"
        store_ceilings(data)
        patch.setenv("XDG_DATA_HOME", str(data))
        yield
