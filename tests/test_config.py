"""Options: defaults, the environment, bad values, keys, directories, and the generated table."""
from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import svod.config as config
from svod.config import BeamConfig, BenchConfig, OptimizerConfig, PrepareConfig
from svod.errors import ConfigError
from svod.system.process import directories

ROOT = Path(__file__).parent.parent
VARIABLES = sorted(o.variable for c in config.CONFIGS for f in fields(c)  # type: ignore[arg-type]
                   if (o := f.metadata.get("option")) and o.variable)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_the_documented_ones() -> None:
    beam = BeamConfig.from_env()
    assert (beam.width, beam.upcast_max, beam.local_max, beam.uops_max, beam.runs) == (0, 256, 1024, 3000, 3)
    assert (beam.min_progress, beam.timeout_sec, beam.budget, beam.padto, beam.strict) == (0.01, 10.0, 60.0, False, "")
    prepare = PrepareConfig.from_env()
    assert prepare == PrepareConfig() and prepare.beam is None and prepare.opt_cache_max == 4096 and not prepare.noopt
    assert BeamConfig().width == 4, "a BeamConfig written in Python searches"
    assert BenchConfig.from_env() == BenchConfig() and OptimizerConfig.from_env() == OptimizerConfig()


def test_variables_are_declared_once_and_all_of_the_design_are_there() -> None:
    assert len(VARIABLES) == len(set(VARIABLES))
    wanted = {"BEAM", "BEAM_UPCAST_MAX", "BEAM_LOCAL_MAX", "BEAM_UOPS_MAX", "BEAM_RUNS", "BEAM_MIN_PROGRESS", "BEAM_TIMEOUT_SEC",
              "BEAM_PADTO", "BEAM_STRICT", "BEAM_DEBUG", "BEAM_LOG_SURPASS_MAX", "BEAM_BUDGET", "IGNORE_BEAM_CACHE", "NOLOCALS", "TC",
              "SVOD_NOOPT", "SVOD_THREADS", "SVOD_DEVICE", "SVOD_TUNE_DB", "SVOD_MEMORY_PLANNER",
              "SVOD_DISABLE_SCHEDULE_CACHE", "SVOD_OPT_CACHE_MAX", "SVOD_OBJECT_CACHE", "SVOD_CAPTURE", "SVOD_LOCK"}
    assert wanted <= set(VARIABLES)


def test_variables_that_no_option_has_are_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("SVOD_TUNEDB", "SVOD_XYZ", "BEAM_BUGDET", "BEAM_ESTIMATE", "SVODKA", "BEAMS_OF_LIGHT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(config, "_environment_looked_at", False)
    for _ in range(2):
        PrepareConfig.from_env()
        PrepareConfig().in_environment()
    unknown = [m.split(" is unknown and has no effect; ")[0].split()[-1] for m in caplog.messages]
    assert unknown == ["BEAM_BUGDET", "SVOD_TUNEDB", "SVOD_XYZ"]
    assert [m.split("; ")[1] for m in caplog.messages] == ["BEAM_BUDGET is known", "SVOD_TUNE_DB is known",
                                                           "docs/generated/options.md lists all"]


@pytest.mark.parametrize(("name", "text"), [
    ("BEAM", "abc"), ("BEAM", "-1"), ("BEAM", "2.5"), ("BEAM_RUNS", "0"), ("BEAM_MIN_PROGRESS", "nan"), ("BEAM_MIN_PROGRESS", "-0.1"),
    ("BEAM_TIMEOUT_SEC", "0"), ("BEAM_TIMEOUT_SEC", "inf"), ("BEAM_PADTO", "maybe"), ("BEAM_STRICT", "1"), ("BEAM_ACTIONS", "all"),
    ("SVOD_THREADS", "0"), ("SVOD_THREADS", "two"), ("IGNORE_BEAM_CACHE", "2"), ("SVOD_NOOPT", "x"), ("TC", "-1"),
    ("SVOD_CONSTANTS", "yes"), ("SVOD_OPT_CACHE_MAX", "0"), ("SVOD_MEMORY_PLANNER", "tlsf"), ("SVOD_MEMORY_PLANNER", "1"),
])
def test_a_bad_value_names_variable_value_and_what_is_accepted(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as e:
        PrepareConfig.from_env()
    assert name in str(e.value) and text in str(e.value) and "accepted:" in str(e.value)


@pytest.mark.parametrize(("name", "text", "said"), [
    ("SVOD_MAX_ERROR", "abc", "a share (0.01 is 1 %), at least 0"), ("SVOD_MAX_ERROR", "-1", "a share (0.01 is 1 %), at least 0"),
    ("SVOD_CHECK_BUDGET", "-3", "a number of seconds, at least 0 (10.0 where it is unset)"),
    ("SVOD_THREADS", "0", "an integer, at least 1"),
])
def test_the_error_of_a_number_is_a_sentence_with_its_range(monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as e:
        PrepareConfig.from_env()
    assert str(e.value) == f"{name}={text!r} is not usable; accepted: {said}"


def test_a_variable_is_read_where_its_option_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM", "abc")
    monkeypatch.setenv("SVOD_THREADS", "2")
    assert BeamConfig.from_env(width=3).width == 3
    assert PrepareConfig.from_env(beam=None).threads == 2
    assert PrepareConfig(beam=BeamConfig(width=5)).in_environment() == PrepareConfig(beam=BeamConfig(width=5), threads=2)
    assert PrepareConfig.env_value("threads") == 2 == config.default_threads()
    with pytest.raises(ConfigError, match="BEAM='abc'"):
        PrepareConfig.from_env()
    monkeypatch.setenv("SVOD_THREADS", "many")
    assert PrepareConfig(threads=1).in_environment().threads == 1
    with pytest.raises(ConfigError, match="SVOD_THREADS='many'"):
        PrepareConfig().in_environment()


@pytest.mark.parametrize(("make", "said"), [
    (lambda: PrepareConfig(thread=2), "PrepareConfig has no option 'thread'; it has beam, optimizer, device, threads"),  # type: ignore[call-arg]
    (lambda: BeamConfig(nonsense=1), "BeamConfig has no option 'nonsense'; it has width"),  # type: ignore[call-arg]
    (lambda: PrepareConfig(opts=3), "chains by kernel key"), (lambda: PrepareConfig(opts={"a": ((1, 2),)}), "chains by kernel key"),  # type: ignore[arg-type]
    (lambda: PrepareConfig(optimizer=3), "OptimizerConfig"), (lambda: PrepareConfig(beam=3), "BeamConfig(width=…)"),  # type: ignore[arg-type]
])
def test_options_that_do_not_exist_and_values_of_other_kinds(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make()


def test_bad_values_in_python_name_the_field() -> None:
    with pytest.raises(ConfigError, match=r"BeamConfig\(width=-2\)"):
        BeamConfig(width=-2)
    with pytest.raises(ConfigError, match=r"threads=True"):
        PrepareConfig(threads=True)
    with pytest.raises(ConfigError, match=r"BeamConfig\(width=…\)"):
        PrepareConfig(beam=4)  # type: ignore[arg-type]


def test_what_means_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM", "4")
    assert PrepareConfig.from_env().beam == BeamConfig(width=4)
    monkeypatch.setenv("SVOD_NOOPT", "1")
    assert PrepareConfig.from_env().beam is None, "SVOD_NOOPT wins over BEAM"
    monkeypatch.setenv("SVOD_NOOPT", "0")
    assert PrepareConfig.from_env().beam is not None
    monkeypatch.setenv("SVOD_CAPTURE", "somewhere")
    assert PrepareConfig.from_env().beam is None, "nothing is searched while capturing"
    monkeypatch.delenv("SVOD_CAPTURE")
    monkeypatch.setenv("BEAM", "0")
    assert PrepareConfig.from_env().beam is None
    assert PrepareConfig(beam=BeamConfig(width=0)).beam is None


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("false", False), ("Yes", True), ("", False), (" ", False)])
def test_switches(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("IGNORE_BEAM_CACHE", text)
    assert BeamConfig.from_env().ignore_cache is value


def test_strict_and_object_cache_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM_STRICT", "reference")
    monkeypatch.setenv("SVOD_OBJECT_CACHE", "0")
    assert BeamConfig.from_env().strict == "reference"
    assert config.object_cache_dirs(PrepareConfig.from_env().object_cache) == ()
    assert config.object_cache_dirs("here") == config.object_cache_dirs(Path("here")) == (Path("here"),)
    monkeypatch.setenv("SVOD_OBJECT_CACHE", os.pathsep.join(["/own", "/shipped"]))
    assert config.object_cache_dirs(PrepareConfig.from_env().object_cache) == (Path("/own"), Path("/shipped"))


def test_child_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM", "4")
    env = config.child_environment(BEAM=None, SVOD_CAPTURE="d")
    assert "BEAM" not in env and env["SVOD_CAPTURE"] == "d" and os.environ["BEAM"] == "4"


def test_default_environment_gives_way_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBRARY_A", "user")
    monkeypatch.delenv("LIBRARY_B", raising=False)
    with config.default_environment(LIBRARY_A="ours", LIBRARY_B="ours"):
        assert (os.environ["LIBRARY_A"], os.environ["LIBRARY_B"]) == ("user", "ours")
    assert "LIBRARY_B" not in os.environ
    config.set_default_environment(LIBRARY_A="ours")
    assert os.environ["LIBRARY_A"] == "user"
    with config.changed_environment(LIBRARY_A="ours", LIBRARY_B="ours"):
        assert (os.environ["LIBRARY_A"], os.environ["LIBRARY_B"]) == ("ours", "ours")
    assert os.environ["LIBRARY_A"] == "user" and "LIBRARY_B" not in os.environ


def test_data_dir_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where the directory should be: not writable even for root
    monkeypatch.setattr(directories, "user_data", lambda: blocked / "svod")
    monkeypatch.setattr(config, "_said", set())
    with caplog.at_level(logging.WARNING, "svod"):
        assert config.data_dir() == tmp_path / ".svod" == config.data_dir()
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    assert not (tmp_path / ".svod").exists(), "resolving creates nothing"
    monkeypatch.setattr(directories, "is_writable", lambda path: False)
    with caplog.at_level(logging.WARNING, "svod"):
        assert config.data_dir() == tmp_path / ".svod"
    assert "nor can" in caplog.records[-1].message and caplog.records[-1].message.endswith("are not kept")
    monkeypatch.undo()
    monkeypatch.setattr(directories, "user_data", lambda: tmp_path / "a" / "b")
    assert config.data_dir() == tmp_path / "a" / "b"




def test_imports_nothing_heavy() -> None:
    tree = ast.parse((ROOT / "svod" / "config.py").read_text(encoding="utf-8"))
    imported = {a.name.split(".")[0] for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert imported <= {"__future__", "collections", "contextlib", "dataclasses", "logging", "os", "pathlib", "svod", "typing"}
