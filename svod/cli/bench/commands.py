"""The commands of svod-bench. Results go to stdout, progress and remarks to stderr."""
from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click.core import ParameterSource

from svod import config
from svod.cli.installation import interpreter
from svod.cli.outputs import CountType, Number, check_database, check_is_there, check_output
from svod.compile.backend import backend_named, device_named
from svod.core.machine.target import HOST, Target
from svod.errors import ConfigError, DatabaseError, UnsupportedError
from svod.system.files import write_text
from svod.system.process.directories import kept_folder
from svod.system.process.program import arguments
from svod.system.quantities import count as counted

if TYPE_CHECKING:
    from svod.bench.peers.alone import Alone
    from svod.bench.results import CaseResult, PeerInfo, Run, RunSettings
    from svod.bench.suites.cases import Case

TORCH_NEEDS = {"torch": ("torch", "torchvision", "transformers"), "blocks": ("torch",)}
NEW_SEEDS = 1_000_000   # drawn seeds are below this: short enough to type
LOAD_SECONDS = 0.5      # seconds for which the machine's load is watched before a run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="svod", message="svod %(version)s")
def cli() -> None:
    """Measure this machine, svod's kernels and other libraries the same way; compare runs; make reports."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("svod: %(message)s"))
    logging.getLogger("svod").addHandler(handler)


@cli.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT",
              help="Also write the figures to a file.")
@click.option("--refresh", is_flag=True, help="Measure again, even where figures are known.")
@click.option("--device", metavar="NAME", help="The device, such as WEBGPU; default: SVOD_DEVICE, else CPU.")
def ceilings(json_path: Path | None, refresh: bool, device: str | None) -> None:
    """Show this machine's peak rates: multiply-adds, bandwidth by cache level, the cost of a launch."""
    from svod.bench.roofline import cached_ceilings
    from svod.cli.bench.tables import print_ceilings

    check_output("--json", json_path)
    target = _target(config.PrepareConfig.from_env() if device is None else config.PrepareConfig.from_env(device=device))
    _warn_if_busy(target)
    path = _ceilings_path()
    start = time.monotonic()
    ceilings = cached_ceilings(path, target, refresh=refresh)
    known = time.monotonic() - start < 0.1
    print_ceilings(ceilings, target.has_groups)
    _say(f"{target.key}; " + (f"measured before, kept in {path}; --refresh measures again" if known else "measured now"))
    if json_path is not None:
        write_text(json_path, json.dumps(asdict(ceilings), indent=1) + "\n")


class _RunCommand(click.Command):
    """A command that explains how to name kernels when it meets an unexpected argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as e:
            if not e.format_message().startswith("Got unexpected extra argument"):
                raise
            from svod.bench.suites.suites import SUITE_NAMES

            words = [a for a in given if not a.startswith("-")]
            hint = next((f"--suite {a}" for a in words if a in (*SUITE_NAMES, "all")), f"--kernels '{words[-1]}*'")
            raise click.UsageError(f"{e.format_message().rstrip('.')}; kernels are named by options, as in: svod-bench run {hint}. "
                                   f"The suites are {', '.join(SUITE_NAMES)}, and all; svod-bench run --suite all --list shows their "
                                   "kernels", ctx) from e


@cli.command(cls=_RunCommand)
@click.option("--suite", default="core", show_default=True, metavar="NAMES",
              help="Which kernels: core, odd, models, random, gpu; whole models: onnx, torch; blocks of layers: blocks; with commas, or "
                   "all.")
@click.option("--kernels", default="*", metavar="GLOB",
              help="Only kernels whose names match; several patterns are joined by commas. A block may be written out.")
@click.option("--beam", type=CountType(min=1), metavar="N", help="Search what the tuning database lacks, with this beam width.")
@click.option("--budget", type=Number("seconds", min=1), metavar="SECONDS",
              help="With a beam: most seconds of search for each kernel or model; default: BEAM_KERNEL_BUDGET, of a model 600.")
@click.option("--heuristic", is_flag=True, help="Use svod's heuristics alone.")
@click.option("--db-only", is_flag=True,
              help="Use heuristics and the tuning database without a search. The default without BEAM.")
@click.option("--fresh", is_flag=True, help="With a beam: also search kernels that the database knows.")
@click.option("--peers", default="all", show_default=True, metavar="NAMES", help="Libraries to compare with, with commas; all, or none.")
@click.option("--device", metavar="NAME", help="The device that svod's kernels run on, such as WEBGPU; default: SVOD_DEVICE, else CPU.")
@click.option("--db", metavar="PATHS", help="Databases instead of SVOD_TUNE_DB: the first is written, all are read.")
@click.option("--seed", type=CountType(min=0),
              help="Seed of the operands and of the suites random and blocks; default: 0, and with these suites a number drawn now.")
@click.option("--count", type=CountType(min=1), metavar="N", help="How many cases the suites random and blocks have; default: 20 and 100.")
@click.option("--limit", type=Number("times", min=1.0), metavar="FACTOR",
              help="Of the suite blocks: report what takes more than FACTOR times as long as eager; default: 1.1.")
@click.option("--dump-after", metavar="PASSES", help="Print each plan of svod after these passes, like SVOD_DUMP_AFTER.")
@click.option("--list", "only_list", is_flag=True, help="Only show the kernels of the suite.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT", help="Write everything to a file.")
@click.option("--resume", is_flag=True, help="Keep the results that the file of --json has, and measure the kernels that it lacks.")
def run(suite: str, kernels: str, beam: int | None, budget: float | None, heuristic: bool, db_only: bool, fresh: bool, peers: str,
        device: str | None, db: str | None, seed: int | None, count: int | None, limit: float | None, dump_after: str | None,
        only_list: bool, json_path: Path | None, resume: bool) -> None:
    """Time kernels: svod's heuristics, tuned, and every installed peer, interleaved, each result checked against NumPy first."""
    from svod.bench.blocks.families import BLOCK_SUITE
    from svod.bench.peers import parse_peers
    from svod.bench.results import FORMAT, RunSettings
    from svod.bench.suites.cases import REFERENCE
    from svod.bench.suites.suites import parse_suites
    from svod.compile.plan.dump import passes_of
    from svod.system.tables import print_table

    only_heuristic = heuristic or (parse_suites(suite) == (BLOCK_SUITE,) and not db_only and beam is None)
    mode, width = _mode(beam, only_heuristic, db_only, fresh)
    check_database(db if mode == "beam" else None)
    prepare = config.PrepareConfig.from_env() if device is None else config.PrepareConfig.from_env(device=device)
    before = _begun(json_path) if resume else None
    if seed is None and before is not None:
        seed = before.settings.seed
    cases, seed, count = _selected(suite, kernels, seed, count, limit, prepare)
    names = parse_peers(peers)
    if BLOCK_SUITE in parse_suites(suite) and REFERENCE[BLOCK_SUITE] not in names:
        raise click.UsageError(f"the suite {BLOCK_SUITE} is compared with {REFERENCE[BLOCK_SUITE]}; add it to --peers")
    if only_list:
        print_table(("kernel", "what", "group", "dtype", "operands"), [(c.name, c.title, c.group, c.dtype, c.shapes) for c in cases],
                    fold=frozenset({"operands"}))
        return
    check_output("--json", json_path, format=FORMAT)
    if budget is not None and mode != "beam":
        raise click.UsageError("--budget is the time of a search; add --beam N")
    cases = _installed(cases)
    prepare = prepare if dump_after is None else replace(prepare, dump_after=dump_after)
    passes_of(prepare)
    settings = RunSettings(shlex.join(["svod-bench", *arguments()]), suite, kernels, mode, width, fresh, seed,
                           datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"), 0.0, count)
    known = [] if before is None else _known(before, settings, _target(prepare))
    result = _run_cases(cases, names, settings, prepare, db, json_path, budget, known)
    sys.exit(_conclude(result, len({c.name for c in cases} | {k.name for k in known}), json_path))


def _selected(suite: str, kernels: str, seed: int | None, count: int | None, limit: float | None,
              prepare: config.PrepareConfig) -> tuple[list[Case], int, int | None]:
    """Return (the chosen cases, the seed, the number of cases in the largest suite that is drawn from the seed, or None without such a
    suite)."""
    from svod.bench.blocks.families import BLOCK_SUITE, SLOWNESS_LIMIT
    from svod.bench.suites.gpu_kernels import GPU, is_gpu
    from svod.bench.suites.suites import SEEDED_SUITES, parse_suites, select_cases

    suites = parse_suites(suite)
    drawn = [name for name in suites if name in SEEDED_SUITES]
    if count is not None and not drawn:
        raise click.UsageError(f"--count {count} applies to the suites {' and '.join(SEEDED_SUITES)}; add --suite {BLOCK_SUITE}")
    if limit is not None and BLOCK_SUITE not in suites:
        raise click.UsageError(f"--limit applies to the suite {BLOCK_SUITE}; add --suite {BLOCK_SUITE}")
    if seed is None:
        seed = secrets.randbelow(NEW_SEEDS) if drawn else 0
    small = GPU in suites and not is_gpu(target := _target(prepare))
    if small:
        what = "a driver in software" if target.software_lanes else "no GPU"
        _say(f"the suite gpu is of small kernels, as {prepare.device or HOST} is {what}")
    cases = select_cases(suite, kernels, seed=seed, count=count, small=small, limit=limit or SLOWNESS_LIMIT)
    totals = []
    for name in drawn:
        found = sum(c.suite == name for c in cases)
        totals.append(found if name == BLOCK_SUITE else count or SEEDED_SUITES[name])
        _say(f"the suite {name} is {found} kernels of seed {seed}; --seed {seed} gives the same ones again")
    return cases, seed, max(totals, default=None)


def _installed(cases: Sequence[Case]) -> list[Case]:
    """The cases that this machine has files and packages for; the others are listed on stderr. Raises UnsupportedError if none is left."""
    from svod.bench.suites.onnx_files import file_named

    found: list[Case] = []
    missing: dict[str, list[str]] = {}
    for case in cases:
        try:
            if case.op == "onnx":
                file_named(case.name).find()
            elif lacking := [m for m in TORCH_NEEDS.get(case.op, ()) if find_spec(m) is None]:
                raise UnsupportedError(f"the suite {case.op} needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
            found.append(case)
        except UnsupportedError as e:
            missing.setdefault(str(e), []).append(case.name)
    for why, names in missing.items():
        _say(f"left out: {', '.join(names)}. {why[:1].upper()}{why[1:]}")
    if cases and not found:
        raise UnsupportedError("nothing is left to measure: " + "; ".join(missing))
    return found


def _begun(path: Path | None) -> Run | None:
    """Read the run that --resume continues from `path`; None if there is no such file yet. Raises click.UsageError if `path` is None."""
    from svod.bench.results import read_run

    if path is None:
        raise click.UsageError("--resume goes on with the file of --json; give one")
    return read_run(path) if path.exists() else None


def _known(before: Run, settings: RunSettings, target: Target) -> list[CaseResult]:
    """The results of the run that --resume continues. Raises FormatError if they are of another machine or seed."""
    from svod.bench.compare import check_comparable
    from svod.bench.load import MachineLoad
    from svod.bench.machine import machine_of, versions
    from svod.bench.results import Run
    from svod.bench.runner import load_of

    now = Run(settings, machine_of(target), versions(target.device), load_of(MachineLoad()), None, (), (), ())
    check_comparable(before, now, "name another file with --json for a run of its own")
    return list(before.cases)


def _target(prepare: config.PrepareConfig) -> Target:
    """The target of the device that a configuration names. Raises DeviceError if no kernel can run on it."""
    backend = device_named(prepare.device or HOST).backend
    backend.check_runs()
    return backend.target()


def _say_who_is_left_out(names: Sequence[str], infos: Sequence[PeerInfo]) -> None:
    """Say which of the peers `names` are not installed and what installs each, and, if the peers were chosen, which have no part in the
    suites of a run. `infos`: as `load_peers` returns them."""
    from svod.bench.peers import PEER_LIBRARIES, lacking, suites_in_words

    pip = f"{interpreter()} -m pip install"
    absent = {i.name: i.missing for i in infos if i.missing is not None}
    for name, why in absent.items():
        needed = lacking(name)
        _say(f"left out: {name}, as {why}" + (f": {pip} {' '.join(needed)}" if needed else ""))
    if len(absent) > 1:
        _say(f"all peers at once: {pip} 'svod[peers]'")
    idle = [] if list(names) == list(PEER_LIBRARIES) else [n for n in names if n not in {i.name for i in infos}]
    for name in idle:
        _say(f"left out: {name}, which takes part in {suites_in_words(name)}")


def _run_cases(cases: Sequence[Case], names: Sequence[str], settings: RunSettings, prepare: config.PrepareConfig, db: str | None,
               json_path: Path | None, budget: float | None = None, known: Sequence[CaseResult] = ()) -> Run:
    """Measure the ceilings where they are unknown, then run the cases against the libraries in `names` and report the progress."""
    from svod.bench.ceiling_loops import CeilingLoops
    from svod.bench.peers import load_peers
    from svod.bench.peers.alone import Alone
    from svod.bench.results import write_run
    from svod.bench.roofline import cached_ceilings, known_ceilings
    from svod.bench.runner import run_suite
    from svod.cli.bench.contestants import svod_contestants
    from svod.cli.bench.tables import describe_case

    target = _target(prepare)
    _warn_if_busy(target)
    libraries, infos = load_peers(names, target.threads, {kind for c in cases for kind in c.kinds})
    _say_who_is_left_out(names, infos)
    path, ceilings = _ceilings_path(), None
    if backend_named(target.device).ceilings is None:
        _say(f"nothing measures what the device {target.device} can do at best; the kernels have no bounds")
    else:
        figures = known_ceilings(path, target)
        if figures is None or figures.quick:
            _say(f"measuring this machine's peak rates, which takes some ten seconds; they are kept in {path} unless the machine is busy")
        ceilings = cached_ceilings(path, target)
    own = svod_contestants(settings.mode, settings.beam, fresh=settings.fresh, db=db, config=prepare, budget=budget)
    contestants = [*own, *libraries]
    done = {k.name for k in known if k.svod is not None}
    wanted, cases = cases, [c for c in cases if c.name not in done]
    if len(cases) < len(wanted):
        _say(f"{json_path} has {len(wanted) - len(cases)} of {len(wanted)} already")
    alone = Alone([i.name for i in infos if i.version is not None], {c.name: c.config for c in own}, settings.seed, target.threads,
                  max((c.config.beam.budget for c in own if c.config.beam is not None), default=0.0))
    together = ", ".join(["svod", *(f"{i.name} {i.version}" for i in infos if i.version is not None)])
    _say(f"{counted(len(cases), 'kernel')}, {counted(target.threads, 'thread')} each: {together}")

    arithmetic = None
    if ceilings is not None and target.device == HOST:
        arithmetic = partial(CeilingLoops(target).best_round, threads=ceilings.threads)

    def finished(so_far: Run) -> None:
        click.echo("\n".join(describe_case(so_far.cases[-1])) + "\n")
        if json_path is not None:       # written after each case, in case a library crashes the process
            with contextlib.suppress(OSError):      # the last write reports the error
                write_run(json_path, so_far)
    with contextlib.closing(alone):
        result = run_suite(cases, contestants, infos, settings, config.BenchConfig.from_env(), target=target, ceilings=ceilings,
                           arithmetic=arithmetic,
                           started=lambda i, c: _say(f"[{i + 1}/{len(cases)}] {c.title}"), finished=finished, alone=alone, known=known)
        return _investigated(result, wanted, alone, target) if any(c.limit is not None for c in wanted) else result


def _investigated(result: Run, cases: Sequence[Case], alone: Alone, target: Target) -> Run:
    """The run with the findings of its blocks, which are printed as they are made. Ctrl-C keeps those that are done."""
    from svod.bench.blocks.families import SLOWNESS_LIMIT
    from svod.bench.blocks.findings import Investigation, family_results
    from svod.bench.runner import run_suite
    from svod.bench.summary import group_results, suite_results
    from svod.cli.bench.tables import describe_finding

    protocol = config.BenchConfig.from_env()

    def measure(case: Case) -> CaseResult:
        return run_suite([case], (), (), result.settings, protocol, target=target, alone=alone).cases[-1]
    limit = next((c.limit for c in cases if c.limit is not None), SLOWNESS_LIMIT)
    findings, measured = [], {c.name: c for c in result.cases}
    with contextlib.suppress(KeyboardInterrupt):
        for again, finding in Investigation(alone, measure, limit).findings(cases, result.cases):
            measured[again.name] = again
            if finding is not None:
                findings.append(finding)
                click.echo("\n".join(describe_finding(finding, result.settings.seed)) + "\n")
    final = list(measured.values())
    return replace(result, cases=tuple(final), groups=group_results(final), suites=suite_results(final), families=family_results(final),
                   findings=tuple(findings))


def _conclude(result: Run, asked_for: int, json_path: Path | None) -> int:
    """Print and write a run. Returns the exit status."""
    from svod.bench.blocks.findings import faults_of
    from svod.cli.bench.tables import print_run

    print_run(result)
    if json_path is not None:
        _write_at_last(json_path, result)
    done = len(result.cases)
    missing = "" if done == asked_for else f"; interrupted, {asked_for - done} are missing"
    _say(f"{counted(done, 'kernel')} in {result.settings.seconds:.0f} s{missing}")
    wrong = [f"{c.name} ({o})" for c in result.cases for o in faults_of(c)]
    if wrong:
        _say(f"svod gives wrong results or fails: {', '.join(wrong)}")
    return 130 if done < asked_for else 1 if wrong else 0


@cli.command()
@click.argument("before", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="A.json")
@click.argument("after", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="B.json")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--force", is_flag=True, help="Also compare runs of different machines or protocols.")
def compare(before: Path, after: Path, as_json: bool, force: bool) -> None:
    """Show what got faster or slower from A to B beyond the noise. Exit status: 0 nothing is worse, 1 something is, 2 not comparable."""
    from svod.bench.compare import check_comparable, compare_runs
    from svod.bench.results import read_run
    from svod.cli.bench.tables import print_comparison

    a, b = read_run(before), read_run(after)
    if not force:
        check_comparable(a, b, "measure both on one machine, or add --force to compare them anyway")
    for path, r in ((before, a), (after, b)):
        if r.load.busy is not None:
            _say(f"{path}: {r.load.busy} during the run")
    comparison = compare_runs(a, b)
    if as_json:
        click.echo(json.dumps(asdict(comparison) | {"worse": comparison.worse}, indent=1))
    else:
        print_comparison(comparison)
    sys.exit(1 if comparison.worse else 0)


@cli.command()
@click.argument("runs", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[RUN.json]...")
@click.option("--db", metavar="PATHS", help="Tuning databases whose searches are shown.")
@click.option("--with-db", is_flag=True, help="Also show the searches in SVOD_TUNE_DB, else the user's database. The default without runs.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--markdown", is_flag=True, help="The figures as Markdown, for a pull request, to stdout.")
def report(runs: tuple[Path, ...], db: str | None, with_db: bool, output: Path, markdown: bool) -> None:
    """Make one HTML file that opens offline: of runs, of the searches in a tuning database, or of both. Runs alone show no database."""
    from svod.bench.report.page import render_markdown, write_report
    from svod.bench.results import read_run
    from svod.system.pages import check_page
    from svod.tune.db import TuningDB
    from svod.tune.report_source import read_tuning

    if markdown and click.get_current_context().get_parameter_source("output") is not ParameterSource.DEFAULT:
        raise ConfigError(f"-o {output}: --markdown goes to the standard output; leave -o away, and add > FILE for a file")
    if not markdown:
        check_output("-o", output, *runs)
        check_page(output)
    results = [read_run(path) for path in runs]
    tuning = None
    spec = db if db is not None else config.PrepareConfig.env_value("db") if with_db or not runs else config.NONE
    if spec != config.NONE:
        with TuningDB.open(spec, read_only=True) as database:
            if db is not None:
                check_is_there(database.plan)
            if database.problem is not None:
                raise DatabaseError(database.problem)
            last = results[-1] if results else None
            tuning = read_tuning(database, last.machine.target if last is not None else None, last.ceilings if last is not None else None)
    if markdown:
        click.echo(render_markdown(results, tuning))
        return
    write_report(results, tuning, output)
    _say(f"{output} written; it opens in any browser, offline")


def _write_at_last(path: Path, result: Run) -> None:
    """Write the run to `path`. If that fails, save it in a temporary folder, then raise the OSError."""
    from svod.bench.results import write_run

    try:
        write_run(path, result)
    except OSError:
        saved = kept_folder("svod-bench-") / path.name
        write_run(saved, result)
        _say(f"the results are in {saved}")
        raise


def _mode(beam: int | None, heuristic: bool, db_only: bool, fresh: bool) -> tuple[Literal["beam", "db-only", "heuristic"], int | None]:
    """The mode of svod and the beam width. BEAM applies where no option is given."""
    given = [name for name, on in (("--beam", beam is not None), ("--heuristic", heuristic), ("--db-only", db_only)) if on]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} do not go together; give one of them")
    width = beam
    if not given:
        width = config.BeamConfig.env_value("width") or None
    if fresh and width is None:
        raise click.UsageError("--fresh needs a search; add --beam N")
    return ("heuristic" if heuristic else "beam" if width is not None else "db-only"), width


def _ceilings_path() -> Path:
    return config.data_dir() / "ceilings.json"


def _warn_if_busy(target: Target) -> None:
    from svod.bench.load import watch_machine

    seen = watch_machine()
    time.sleep(LOAD_SECONDS)
    load = seen()
    if load.busy is not None:
        _say(f"warning: the machine is busy ({load.busy}; load average {load.load_average:.1f}); times will be noisy")
    if target.threads == 1 and not target.has_groups:
        _say("there is one core only, so nothing is measured with several threads")


def _say(text: str) -> None:
    click.echo(text, err=True)
