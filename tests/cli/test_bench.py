"""svod-bench as users call it, with recorded ceilings instead of measurements; one test really runs benchmarks, and checks their results
but no times."""
from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import svod.bench.load
import svod.bench.results
import svod.bench.roofline
import svod.bench.suites.cases
from svod.bench.compare import compare_runs
from svod.bench.load import MachineLoad
from svod.bench.peers import PEER_LIBRARIES
from svod.bench.results import Run, Speedup, read_run, write_run
from svod.cli import one_line
from svod.cli.bench import commands as bench_commands
from svod.cli.bench.tables import describe_case, print_comparison, print_run, times
from svod.cli.installation import interpreter
from svod.errors import SvodError
from svod.system.quantities import bytes_rate, flops_rate, seconds, spread
from tests.bench.example_run import CEILINGS, DATA, example_model_run, example_run
from tests.toy_backend.target import TOY

Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Call]:
    """A function that runs a command line with recorded ceilings, as on a quiet machine. Errors that `run_command` would report are
    returned as text with status 2."""
    monkeypatch.setattr(svod.bench.roofline, "cached_ceilings", lambda path, target, **kw: CEILINGS)
    monkeypatch.setattr(svod.bench.roofline, "known_ceilings", lambda path, target: CEILINGS)
    monkeypatch.setattr(svod.bench.load, "watch_machine", lambda: lambda: MachineLoad())
    monkeypatch.setattr(bench_commands, "LOAD_SECONDS", 0.0)
    monkeypatch.setenv("SVOD_BENCH_CASE_SECONDS", "0")
    monkeypatch.setenv("SVOD_BENCH_ROUNDS", "6")
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Result:
        result = CliRunner().invoke(bench_commands.cli, list(args))
        if isinstance(result.exception, SvodError):
            result.exit_code, result.stderr_bytes = 2, str(result.exception).encode()
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result
    yield run


# -- bad input ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("args", "words"), [
    (["run", "--suite", "huge"], ["'huge'", "core, odd, models"]),
    (["run", "--kernels", "conv9*"], ["conv9*", "conv3x3_64_56"]),
    (["run", "--peers", "tvm"], ["'tvm'", "numpy, torch, onnxruntime, jax"]),
    (["run", "--beam", "0"], ["accepted: an integer, at least 1"]),
    (["run", "--beam", "4", "--heuristic"], ["--beam and --heuristic do not go together"]),
    (["run", "--heuristic", "--db-only"], ["do not go together"]),
    (["run", "--fresh"], ["--fresh needs a search"]),
    (["run", "--kernels", "gemm_256", "--json", "missing/run.json"], ["missing", "does not exist"]),
    (["ceilings", "--json", "missing/c.json"], ["does not exist"]),
    (["compare", "a.json", "b.json"], ["a.json", "does not exist"]),
    (["run", "--budget", "20"], ["--budget is the time of a search; add --beam N"]),
    (["run", "--resume"], ["--resume goes on with the file of --json"]),
    (["measure"], ["No such command"]),
    (["run", "--suite", "core", "--count", "3"], ["--count 3 applies to the suites random and blocks"]),
    (["run", "--suite", "core", "--limit", "1.2"], ["--limit applies to the suite blocks"]),
    *((["run", "--suite", "blocks", "--limit", limit], [f"{limit!r} is not usable; accepted: a number of times, at least 1"])
      for limit in ("nan", "inf", "0.5", "-1", "much")),
    *((["run", "--suite", suite, "--peers", peers], ["the suite blocks is compared with torch; add it to --peers"])
      for suite, peers in (("blocks", "none"), ("core,blocks", "numpy,jax"))),
    (["run", "--suite", "blocks", "--kernels", "image float32 8: nonsuch"], ["there is no layer 'nonsuch'"]),
    (["run", "--kernels", "gemm_256", "--dump-after", "nonsuch"], ["there is no pass 'nonsuch'", "rangeify"]),
    (["report", "--db", "typo.db"], ["there is no database at", "typo.db"]),
])
def test_bad_input_says_what_exists(call: Call, args: list[str], words: list[str]) -> None:
    result = call(*args)
    assert result.exit_code == 2 and all(w in result.stderr for w in words), result.stderr


def test_results_of_another_version(call: Call, tmp_path: Path) -> None:
    data = json.loads((DATA / "run.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps(data | {"version": 0}))
    result = call("compare", "old.json", str(DATA / "run.json"))
    assert result.exit_code == 2 and "version 0" in result.stderr and "measure again" in result.stderr


def test_a_resumed_run_has_the_seed_of_its_file(call: Call, tmp_path: Path) -> None:
    data = json.loads((DATA / "run.json").read_text())
    data["settings"]["seed"] = 7
    (tmp_path / "run.json").write_text(json.dumps(data))
    resumed = ("run", "--suite", "blocks", "--count", "1", "--resume", "--json", "run.json")
    assert "block_image_7_0" in call(*resumed, "--list").stdout and "block_image_8_0" in call(*resumed, "--list", "--seed", "8").stdout
    pytest.importorskip("torch", reason="needs the package torch: blocks are refused before without it")
    other = call(*resumed, "--seed", "8")
    said = "seed of the operands: 7 and 8; name another file with --json for a run of its own"
    assert other.exit_code == 2 and other.stderr.endswith(said) and "--force" not in other.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["run", "nonsuch"], "--kernels 'nonsuch*'. The suites are core, odd, models, random, gpu, onnx, torch, blocks, and all"),
    (["run", "models", "--heuristic"], "svod-bench run --suite models"), (["run", "--nonsuch"], "No such option"),
    (["run", "--json", "none/r.json"], "the directory"), (["run", "--beam", "2", "--db", "old.json"], "not a tuning database"),
    (["report", "-o", "none/r.html"], "-o none/r.html: the directory"), (["ceilings", "--json", "none/c.json"], "--json none/c.json"),
    (["ceilings", "--json", "-"], "not to the standard output"), (["report", "old.json", "-o", "old.json"], "the command reads this file"),
])
def test_what_cannot_be_run_or_written_is_said_at_once(call: Call, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "old.json").write_text("{}")
    result = call(*arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split()) and not result.stdout
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["old.json"]


@pytest.mark.slow
def test_the_script_itself_answers_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "svod.cli.bench", "run", "--suite", "huge"], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "svod-bench: there is no suite 'huge'" in done.stderr


def test_openblas_is_told_before_numpy_is_imported() -> None:
    program = ("import atexit, os, sys; from svod.cli import bench; assert 'numpy' not in sys.modules; sys.argv[1:] = ['--help'];"
               "atexit.register(lambda: print(os.environ['OPENBLAS_THREAD_TIMEOUT'])); bench.main()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1] == "20"


def test_a_busy_machine_is_said(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svod.bench.load, "watch_machine", lambda: lambda: MachineLoad(0.5, 0.0, 0.4, 0, 3.5))
    result = call("ceilings")
    assert result.exit_code == 0 and "other processes used 40 % of the machine; load average 3.5" in result.stderr


def test_one_core_is_said(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_THREADS", "1")
    result = call("ceilings")
    assert result.exit_code == 0 and "one core only" in result.stderr


def test_a_device_has_no_cores(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_commands, "_target", lambda prepare: TOY)
    result = call("ceilings")
    assert result.exit_code == 0 and "core" not in result.stderr
    assert result.stdout.startswith("\tdevice\nmultiply-add float32\t258 GFLOP/s\n")


# -- what comes out -----------------------------------------------------------------------------------

def test_ceilings(call: Call, tmp_path: Path) -> None:
    result = call("ceilings", "--json", "c.json")
    assert result.exit_code == 0
    assert "multiply-add float32\t258 GFLOP/s\t512 GFLOP/s" in result.stdout
    assert "memory copy, streaming stores\t33.0 GB/s\t44.0 GB/s" in result.stdout
    assert "launch inside a plan\t20.0 ns\t210 ns" in result.stdout
    assert json.loads((tmp_path / "c.json").read_text())["flops"]["float32"] == [258e9, 512e9]


def test_list(call: Call) -> None:
    result = call("run", "--list", "--suite", "odd", "--kernels", "gemm*")
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["kernel", "gemm_1000", "gemm_197x768x3072", "gemm_255x513x127",
                                                                            "gemm_1x4096x4096"]


def test_list_of_random_kernels_says_its_seed(call: Call) -> None:
    drawn = call("run", "--list", "--suite", "random,odd", "--count", "3")
    found = re.search(r"random is 3 kernels of seed (\d+); --seed \1", drawn.stderr)
    again = call("run", "--list", "--suite", "random", "--count", "3", "--seed", found[1] if found else "")
    assert drawn.exit_code == again.exit_code == 0 and drawn.stdout.splitlines()[:4] == again.stdout.splitlines()
    assert len(call("run", "--list", "--suite", "random", "--seed", "0").stdout.splitlines()) == 21
    assert call("run", "--list").stderr == ""
    blocks = call("run", "--list", "--suite", "blocks", "--count", "2", "--seed", "7", "--kernels", "block_image_*")
    assert [line.split("\t")[0] for line in blocks.stdout.splitlines()] == ["kernel", "block_image_7_0", "block_image_7_1"]
    assert "blocks is 2 kernels of seed 7" in blocks.stderr


@pytest.mark.slow
def test_run(call: Call, tmp_path: Path) -> None:
    result = call("run", "--suite", "odd", "--kernels", "gemm_255*", "--peers", "numpy", "--json", "run.json")
    assert result.exit_code == 0, result.output
    found = read_run(tmp_path / "run.json")
    case = found.cases[0]
    assert case.name == "gemm_255x513x127" and found.settings.mode == "db-only" and found.ceilings == CEILINGS
    assert {c.name: c.status for c in case.contestants} == {"heuristic": "ok", "tuned": "ok", "numpy": "ok"}
    tuned = case.outcome("tuned")
    assert tuned is not None and tuned.same_as == "heuristic" and tuned.kernels[0].source == "heuristic"      # the database is empty
    assert all(o.error is not None and o.error < 1e-5 for o in case.contestants)
    assert "gemm_255x513x127: GEMM 255×513×127" in result.stdout and "1 kernel in" in result.stderr
    assert call("compare", "run.json", "run.json").exit_code == 0


@pytest.mark.slow
def test_blocks_are_found_and_made_smaller(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is slower than almost nothing."""
    pytest.importorskip("torch")
    monkeypatch.setattr("svod.bench.blocks.findings.LEAST_EXCESS_SECONDS", -1.0)
    monkeypatch.setattr("svod.bench.blocks.families.SLOWNESS_LIMIT", 1e-9)
    block = "tokens float32 1x1x2: linear out=2; relu"
    result = call("run", "--suite", "blocks", "--kernels", block, "--seed", "5", "--json", "run.json")
    found = read_run(tmp_path / "run.json")
    finding = found.findings[0]
    assert result.exit_code == 0 and finding.kind == "slow" and finding.found.block == block and finding.found.kernels[0].nest
    assert finding.smallest.block in ("tokens float32 1x1x1: linear out=1", "tokens float32 1x1x1: relu") and finding.judged > 1
    assert found.families[0].blocks == 1 and found.cases[0].outcome("torch") is not None
    assert f"svod-bench run --suite blocks --seed 5 --kernels '{finding.smallest.block}'" in result.stdout


@pytest.mark.slow
def test_missing_peers_are_said_with_what_installs_them(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEER_LIBRARIES, "torch", PEER_LIBRARIES["torch"]._replace(needs=("no_such_torch",)))
    monkeypatch.setitem(PEER_LIBRARIES, "jax", PEER_LIBRARIES["jax"]._replace(needs=("no_such_jax", "numpy", "no_such_lib")))
    run = ["run", "--kernels", "softmax_4096x1024", "--heuristic"]
    result = call(*run, "--peers", "torch,jax")
    assert result.exit_code == 0
    pip = f"{interpreter()} -m pip install"
    assert [line for line in result.stderr.splitlines() if "install" in line] == [
        f"left out: torch, as no_such_torch is not installed: {pip} no_such_torch",
        f"left out: jax, as no_such_jax and no_such_lib are not installed: {pip} no_such_jax no_such_lib",
        f"all peers at once: {pip} 'svod[peers]'"]
    assert "all peers" not in call(*run, "--peers", "torch").stderr


@pytest.mark.slow
def test_chosen_peers_that_take_no_part_are_said(call: Call) -> None:
    run = ["run", "--kernels", "softmax_4096x1024", "--heuristic", "--peers"]
    assert "left out: openvino, which takes part in the suites models, onnx, torch" in call(*run, "openvino,numpy").stderr
    assert "which takes part" not in call(*run, "numpy").stderr


@pytest.mark.slow
def test_run_with_the_heuristic_alone_and_without_peers(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("run", "--kernels", "gemm_256", "--peers", "none", "--heuristic", "--json", "run.json")
    assert result.exit_code == 0, result.output
    found = read_run(tmp_path / "run.json")
    assert [c.name for c in found.cases[0].contestants] == ["heuristic"] and found.peers == () and found.groups[0].speedups == {}
    assert "measuring this machine's peak rates" not in result.stderr
    monkeypatch.setattr(svod.bench.roofline, "known_ceilings", lambda path, target: None)
    result = call("run", "--kernels", "gemm_256", "--peers", "none", "--heuristic")
    assert "measuring this machine's peak rates" in result.stderr and "unless the machine is busy" in result.stderr


def test_results_that_cannot_be_written_are_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    def fill_disk(path: Path, run: Run) -> None:
        if path.name == path.as_posix():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_run(path, run)
    monkeypatch.setattr(svod.bench.results, "write_run", fill_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No space left") as raised:
        bench_commands._write_at_last(Path("run.json"), example_run())
    assert one_line(raised.value) == "run.json: No space left on device"
    saved = Path(capsys.readouterr().err.strip().removeprefix("the results are in "))
    assert saved.is_relative_to(tmp_path) and read_run(saved) == read_run(DATA / "run.json")


def test_wrong_results_end_with_status_1(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svod.bench.suites.cases, "TOLERANCE", {"float32": -1.0})
    result = call("run", "--kernels", "gemm_256", "--peers", "numpy")
    assert result.exit_code == 1 and "svod gives wrong results or fails: gemm_256 (heuristic), gemm_256 (tuned)" in result.stderr
    assert "WRONG" in result.stdout


def test_beam_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_commands._mode(None, False, False, False) == ("db-only", None)
    assert bench_commands._mode(6, False, False, True) == ("beam", 6)
    assert bench_commands._mode(None, True, False, False) == ("heuristic", None)
    monkeypatch.setenv("BEAM", "3")
    assert bench_commands._mode(None, False, False, False) == ("beam", 3)
    assert bench_commands._mode(None, False, True, False) == ("db-only", None)


def test_compare(call: Call) -> None:
    worse = call("compare", str(DATA / "run.json"), str(DATA / "run_slower.json"))
    assert worse.exit_code == 1 and "gemm_1024\ttuned\tslower" in worse.stdout and "2 slower" in worse.stdout
    better = call("compare", str(DATA / "run_slower.json"), str(DATA / "run.json"))
    assert better.exit_code == 0 and "2 faster" in better.stdout
    same = call("compare", str(DATA / "run.json"), str(DATA / "run.json"))
    assert same.exit_code == 0 and "18 same" in same.stdout and "2 noisy" in same.stdout and "before 1.000, 1 noisy" in same.stdout
    data = json.loads(call("compare", "--json", str(DATA / "run.json"), str(DATA / "run_slower.json")).stdout)
    assert data["worse"] is True and len(data["changes"]) == 20


def test_runs_of_other_machines_are_not_compared(call: Call, tmp_path: Path) -> None:
    data = json.loads((DATA / "run.json").read_text())
    data["machine"]["cpu"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(data))
    refused = call("compare", str(DATA / "run.json"), "other.json")
    assert refused.exit_code == 2 and "processor: AMD EPYC 9B45 and another" in refused.stderr and "--force" in refused.stderr
    assert call("compare", "--force", str(DATA / "run.json"), "other.json").exit_code == 0


def test_report(call: Call, tmp_path: Path) -> None:
    assert call("report", str(DATA / "run.json"), "-o", "r.html").exit_code == 0
    assert (tmp_path / "r.html").read_text().lstrip().lower().startswith("<!doctype html>")
    result = call("report", "--markdown", str(DATA / "run.json"))
    assert result.exit_code == 0 and "| gemm" in result.stdout and result.stdout.startswith("### ")


def test_a_report_replaces_reports_and_nothing_else(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("import svod\n")
    result = call("report", str(DATA / "run.json"), "-o", "model.py")
    assert result.exit_code == 2 and "model.py is no page of svod's" in result.stderr and script.read_text() == "import svod\n"
    for _ in range(2):
        assert call("report", str(DATA / "run.json"), "-o", "r.html").exit_code == 0
    result = call("report", "--markdown", str(DATA / "run.json"), "-o", "r.md")
    assert result.exit_code == 2 and "--markdown goes to the standard output" in result.stderr and not (tmp_path / "r.md").exists()


def test_a_report_without_data(call: Call, tmp_path: Path) -> None:
    for args in ([], ["--markdown"]):
        result = call("report", *args)
        assert result.exit_code == 2 and "there is nothing to report" in result.stderr
    assert call("report", "missing.json").exit_code == 2
    result = call("report", str(DATA / "run.json"), "-o", "missing/r.html")
    assert result.exit_code == 2 and "does not exist" in result.stderr
    assert not (tmp_path / "report.html").exists()


# -- text -----------------------------------------------------------------------------------------------

class _Terminal:
    """A terminal that keeps the text that was written to it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Does nothing, as no text is buffered."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    screen: Any = _Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    run = example_run()
    print_run(run)
    print_comparison(compare_runs(run, example_run({"gemm_1024": 1.3}, seed=1)))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in screen.text.splitlines()]
    assert max(map(len, lines)) <= columns
    row = next(line for line in lines if line.startswith("softmax_4096x1024"))
    assert "…" not in row and "x" in row and "%" in row       # nothing is cut off


def test_figures_with_wide_intervals_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    run = example_run()
    case = run.case("gemm_1024")
    assert case is not None and case.best_peer is not None and case.svod is not None
    wide = Speedup(1.5, 1.2, 1.9)
    own = replace(case.svod, spread=0.2, speedups={**case.svod.speedups, case.best_peer: wide})
    changed = replace(case, contestants=tuple(own if o.name == own.name else o for o in case.contestants))
    for one, marked in ((case, False), (changed, True)):
        print_run(replace(run, cases=(one,), groups=(), suites=()))
        out = capsys.readouterr().out
        assert ("known to worse than ±5 %" in out, "1.50x ~" in out, f"{seconds(own.median)} ~" in out) == (marked,) * 3


def test_blocks_of_cases() -> None:
    for run in (example_run(), example_model_run()):
        for case in run.cases:
            assert max(map(len, describe_case(case))) <= 100
    lines = describe_case(example_run().cases[0])
    assert lines[0] == "gemm_256: GEMM 256, float32, bound 65.5 µs (compute)"
    assert "of ceiling" in lines[1] and "× onnxruntime ±" in lines[1] and lines[5].startswith("  torch")
    assert lines[3] == "                  7.66 s  of search"
    assert re.fullmatch(r"  gemm_1024    +4\.\d+ ms  this one has 92 % ±\d\.\d % of its rate", describe_case(example_run().cases[-1])[-1])
    text = "\n".join(describe_case(example_run().cases[6]))
    assert "the same code as heuristic" in text
    assert "unsupported: MatMul is not implemented" in "\n".join(describe_case(example_run().cases[2]))
    assert describe_case(example_model_run().cases[0])[-1] == "  noisy         others used 12 % of the machine"


def test_suites_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of several suites prints one line for each."""
    print_run(example_run())
    table = [line.split("\t") for line in capsys.readouterr().out.split("\n\n")[-1].splitlines()]
    assert table[0] == ["suite", "kernels", "heuristic of tuned", "tuned of best peer", "ceiling", "search", "longest search",
                        "least of neighbour"]
    assert [row[:2] for row in table[1:]] == [["core", "9"], ["odd", "1"]]
    assert table[1][5:] == ["7.66 s", "10.6 s gemm_1024_bf16", ""] and table[2][5:] == ["10.5 s", "10.5 s gemm_1000", "92 % gemm_1000"]


def test_words_for_numbers() -> None:
    assert flops_rate(258e9) == "258 GFLOP/s" and flops_rate(1.5e12) == "1.50 TFLOP/s" and bytes_rate(5e7) == "50.0 MB/s"
    assert spread(0.004) == "±0.4 %" and spread(0.12) == "±12 %" and spread(None) == "–"
    assert times(Speedup(1.04, 1.035, 1.045), "torch") == "1.04× torch ±0.5 %"
    assert times(Speedup(1.01, 0.98, 1.04), "torch") == "= torch ±3.0 %"
    assert times(Speedup(2.0, None, None), "torch") == "2× torch, too few rounds"
