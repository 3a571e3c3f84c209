"""Checks README.md: commands to paste work, options, variables and files exist, and the example runs."""
from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from svod.config import options_table
from tests.bench.stored_ceilings import store_ceilings
from tests.patience import NEVER

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
         for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").glob("*.md")]}
COMMANDS = {"svod-tune": "svod.cli.tune.command", "svod-db": "svod.cli.db.commands", "svod-bench": "svod.cli.bench.commands"}


def marked_command(name: str) -> str:
    """The one line below `<!-- command: NAME -->`, as .ci/run reads it."""
    found = re.search(rf"^<!-- command: {name} -->\n```bash\n(.+)\n```$", README, re.M)
    assert found is not None, f"README.md has no command of one line marked {name}"
    return found[1]


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


@pytest.mark.parametrize(("name", "extra"), [("tune", "tune"), ("test", "test")])
def test_command_installs_extras_that_exist(name: str, extra: str) -> None:
    command = marked_command(name)
    assert f"-e '.[{extra}]'" in command
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict) and set(extra.split(",")) <= extras.keys()


def test_entry_points_are_found_where_svod_is_not_installed(tmp_path: Path) -> None:
    """`.ci/entry_points` makes them visible; their modules exist."""
    subprocess.run([sys.executable, ROOT / ".ci" / "entry_points", tmp_path], check=True)
    found, = importlib.metadata.distributions(path=[str(tmp_path)])
    places = {e.group: e.value for e in found.entry_points}
    assert places["torch_dynamo_backends"] == "svod.torch.backend:svod_backend"
    declared = project()
    assert (found.name, found.version) == (declared["name"], declared["version"])
    assert {e.name: e.value for e in found.entry_points if e.group == "console_scripts"} == declared["scripts"]
    for e in found.entry_points:
        assert (ROOT / f"{e.module.replace('.', '/')}.py").is_file() or (ROOT / e.module.replace(".", "/") / "__init__.py").is_file()


def test_first_command_tunes_resnet() -> None:
    words = shlex.split(marked_command("tune").split("&&")[-1])
    assert words[0] == ".venv/bin/svod-tune" and (ROOT / words[1]).is_file()
    assert words[2:] == ["--beam", "8", "--budget", "120"]


def command_lines(text: str) -> list[list[str]]:
    """Command lines of svod's programs in a page's code, as words after the program's name, the program first; in running text those that
    are more than the program's name."""
    found, block = [], re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
    spans = [" ".join(s.split()) for s in re.findall(r"`([^`]+)`", block.sub("", text))]
    for code in (*block.findall(text), *(s for s in spans if " " in s)):
        for line in code.splitlines():
            for part in re.split(r"&&|\|", line.split("#")[0].removeprefix("$ ")):
                words = part.split()
                while words and re.fullmatch(r"\w+=\S*", words[0]):
                    del words[0]
                if words and Path(words[0]).name in COMMANDS:
                    found.append([Path(words[0]).name, *words[1:]])
    return found


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, text in PAGES.items() for words in command_lines(text)],
                         ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_options_exist(page: str, words: list[str]) -> None:
    command: click.Command = importlib.import_module(COMMANDS[words[0]]).cli
    with click.Context(command) as context:
        known = options_of(command)
        if isinstance(command, click.Group):
            name = next((w for w in words[1:] if not w.startswith("-")), None)
            assert name is not None, f"{page}: {words} names no subcommand"
            sub = command.get_command(context, name)
            assert sub is not None, f"{page}: {words[0]} has no command {name}"
            known |= options_of(sub)
    for word in words[1:]:
        if word == "--":
            break
        if word.startswith("-") and word != "-":     # - alone is a value: the standard output
            assert word.split("=")[0] in known, f"{page}: {words[0]} has no option {word}; it has {sorted(known)}"


def options_of(command: click.Command) -> set[str]:
    return {name for p in command.params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}


@pytest.mark.parametrize("page", PAGES)
def test_variables_exist(page: str) -> None:
    known = set(re.findall(r"^\| `(\w+)` \|", options_table(), re.M))
    for name in re.findall(r"\b(SVOD_[A-Z_]+|BEAM(?:_[A-Z_]+)?)(?==)", PAGES[page]):
        assert name in known, f"{page} sets {name}, which svod does not read"


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    for name in re.findall(r"(?<![\w./-])(?:experiments|tests|svod|docs|tune_db)/[\w./-]*\w\.\w+", PAGES[page]):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_experiments_are_listed() -> None:
    page = PAGES["experiments/README.md"]
    scripts = {p.relative_to(ROOT / "experiments").as_posix() for p in (ROOT / "experiments").rglob("*.py")}
    assert not [s for s in sorted(scripts) if f"`{s}`" not in page], "experiments/README.md leaves something out"
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert name in scripts, f"experiments/README.md lists {name}"


def test_pages_are_listed() -> None:
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not [p for p in sorted(pages) if f"]({p})" not in PAGES["docs/README.md"]], "docs/README.md leaves a page out"


def test_example_runs(tmp_path: Path) -> None:
    found = re.search(r"^<!-- example: python -->\n```python\n(.*?)^```", README, re.M | re.S)
    assert found is not None
    script = tmp_path / "example.py"
    text, shorter = re.subn(r"(?<=budget=)10\b", "2", found[1])      # seconds of search; the result does not matter
    assert shorter == 1
    script.write_text(text, encoding="utf-8")
    store_ceilings(tmp_path / "data")
    # no variable is set: the default database is the user's, which is in this folder
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SVOD_", "BEAM"))}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=NEVER,
                          env={**environment, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(tmp_path / "data")})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "(64, 256)" and lines[-1] == "(64, 10)" and lines[1].startswith("gemm_0 ")
    assert "BEAM=4: searching" in done.stderr
    assert (tmp_path / "data" / "svod" / "tuning.db").exists()
