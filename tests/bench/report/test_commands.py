"""Runs every command that a report recommends, exactly as printed in the page: each searches more."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import pytest

from tests.bench.stored_ceilings import store_ceilings
from tests.cli.test_next_steps import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run command lines with a separate database, on a machine with known ceilings."""
    store_ceilings(tmp_path / "data")
    made = Shell(tmp_path)
    made.env |= {"SVOD_TUNE_DB": "t.db", "BEAM_KERNEL_BUDGET": "4", "BEAM_EXECUTOR": "inline", "SVOD_BENCH_CASE_SECONDS": "0",
                 "SVOD_BENCH_ROUNDS": "6"}
    return made


def report_of(shell: Shell, *args: str) -> str:
    shell(shlex.join(["svod-bench", "report", *args, "-o", "r.html"]))
    return html.unescape((shell.directory / "r.html").read_text())


@pytest.mark.slow
def test_what_a_report_of_a_run_recommends_searches_more(shell: Shell) -> None:
    """The command also searches more if the database has a result of a search of the recommended width."""
    shell("svod-bench run --suite random --seed 3 --count 1 --peers none --beam 8")
    for how in ("--beam 1", "--heuristic"):
        shell(f"svod-bench run --suite random --seed 3 --count 1 --peers none {how} --json run.json")
        next_steps = report_of(shell, "run.json").split('id="next"')[1].split("</section>")[0]
        commands = re.findall(r'class="command">(svod-bench run .*?)</code>', next_steps)
        assert commands, "no kernel comes near these ceilings"
        for command in commands:
            before = len(shell.searches)
            shell(f"{command} --peers none")
            assert len(shell.searches) > before, command


@pytest.mark.slow
def test_what_a_report_of_a_database_recommends_goes_on(shell: Shell) -> None:
    shell("svod-tune model.py --beam 1 --budget 10 --workers inline")
    page = report_of(shell, "--db", "t.db")
    assert "Searches with more to try" in page and re.findall(r"budget [\d.]+\s\w+", page) == ["budget 10\u00a0s"], "as it was given"
    command, = re.findall(r"<code>(svod-tune MODEL.py .*?)</code>", page)
    before = len(shell.searches)
    shell(f"{command.replace('MODEL.py', 'model.py')} --workers inline")
    assert len(shell.searches) > before and shell.searches[-1].config["width"] == 8
    assert "Searches with more to try" not in report_of(shell, "--db", "t.db")


@pytest.mark.slow
def test_a_report_of_a_run_shows_a_database_on_request_only(shell: Shell) -> None:
    shell("svod-bench run --kernels gemm_256 --beam 1 --peers none --json run.json")
    alone = report_of(shell, "run.json")
    assert '<section id="kernels"' not in alone and "1 of 24 kernels of core" in alone
    for option in (["--with-db"], ["--db", "t.db"]):
        assert '<section id="kernels"' in report_of(shell, "run.json", *option)
