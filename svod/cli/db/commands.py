"""The commands of svod-db. They work on the database that --db or SVOD_TUNE_DB names, or else on the user's."""
from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from svod import config
from svod.cli.db.listing import SHOWN_KEY, Order, WinnerRow, chosen, in_order, print_rows, print_with_chains, winner_rows
from svod.cli.db.objects import bake as bake_objects
from svod.cli.db.objects import described_objects, object_rows, problems_of
from svod.cli.db.reasons import program_lines, reason_lines, times_lines
from svod.cli.db.scripts import CapturedKernel, captured_program
from svod.cli.outputs import Number, check_is_there, check_output, how_to_fill
from svod.cli.tune.command import check_program, options_of
from svod.cli.tune.command import cli as svod_tune
from svod.cli.tune.options import TuneOptions
from svod.compile.backend import backend_named, target_with
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_of, chain_words
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.tree.show import print_nest
from svod.errors import ConfigError, DatabaseError, SvodError
from svod.system.quantities import count, seconds
from svod.system.tables import printable
from svod.tune.db import (
    LAYER_NAMES,
    FormTimes,
    KernelRecord,
    Measurement,
    Merged,
    PlanTimes,
    Rounding,
    Search,
    Skipped,
    TargetFacts,
    TuningDB,
    Verdict,
    described,
    files,
    moving,
    origins_of,
)
from svod.tune.db.transfer import EXPORT_FORMAT
from svod.tune.db.why import describe_searches
from svod.tune.fast.report import by_plan, rounding_words
from svod.tune.lock import Lock, Locked, LockedRounding, LockedTimes, check_whole, problem_of_lock, read_lock

EXIT_SKIPPED = 1        # exit status of import and merge where some records could not be used
# the options of svod-tune that say how a program is run, by parameter
OF_PROGRAMS = {name: f"--{name.replace('_', '-')}" for name in ("dim", "shape", "inputs", "random_weights", "outputs", "fallback", "torch")}


def _set_database(context: click.Context, parameter: click.Parameter, spec: str | None) -> None:
    if spec is not None:
        context.obj = spec


def _database_option() -> click.Option:
    return click.Option(["--db"], metavar="PATHS", expose_value=False, callback=_set_database,
                        help="Databases instead of SVOD_TUNE_DB: the first is written, all are read.")


class _DbCommand(click.Command):
    """A command that accepts --db after its name as well as before it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(_database_option())


class _DbGroup(click.Group):
    command_class = _DbCommand

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(_database_option())


@click.group(cls=_DbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="svod", message="svod %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Look at the tuning database, move records between machines, retract them. --db may stand before the command and behind it."""
    logging.getLogger("svod").addHandler(logging.NullHandler())  # the commands report the problems themselves


def _say(text: str = "", err: bool = False) -> None:
    """Print text without control characters, as names, reasons and chains may come from untrusted records."""
    click.echo(printable(text), err=err)


CHECKED_ALWAYS = 64 << 20       # every command checks databases below this many bytes for damaged pages


def _open(context: click.Context, *, read_only: bool = True, missing: bool = True) -> TuningDB:
    """The database of a command. Raises DatabaseError if it is damaged, if it cannot be written and `read_only` is False, or if it does
    not exist and `missing` is False."""
    spec = context.obj if context.obj is not None else config.PrepareConfig.env_value("db")
    db = TuningDB.open(spec, read_only=read_only)
    context.call_on_close(db.close)
    for path in (db.plan.write, *db.plan.read):
        # the check reads every page: a large database is checked by the commands that write it
        if not isinstance(path, Path) or path.suffix == ".jsonl":
            continue
        if not read_only or (path.exists() and path.stat().st_size < CHECKED_ALWAYS):
            _check_whole(path)
    problem = db.problem if read_only else db.storage.obstacle()
    if problem is not None:
        raise DatabaseError(problem)
    if not missing:
        check_is_there(db.plan)
    return db


def _check_whole(path: Path) -> None:
    """Refuse a database with damaged pages, which may have lost any of its records."""
    try:
        connection = files.open_for_reading(path)
        if connection is None:
            return
        with contextlib.closing(connection):
            answer = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
    except (DatabaseError, OSError, sqlite3.OperationalError):
        return      # a foreign, newer, locked or unreadable file is reported when it is read
    except sqlite3.DatabaseError as e:
        raise DatabaseError(files.complaint(path, e)) from e


def _resolve_kernel(db: TuningDB, text: str, *, shipped: bool = False, locked: Iterable[Locked | LockedRounding | LockedTimes] = ()) -> str:
    """The key of the single kernel, or convolution, that `text` means: a key or its beginning, else a name or an origin, else a part of
    one. A number at the end is ignored if nothing else fits, as plans number their kernels: gemm_0 is a kernel called gemm. `shipped`: if
    the user's records have no such kernel, also look for the key among kernels that ship with svod. `locked`: lines of a lock file, whose
    kernels count as the user's."""
    names: dict[str, set[str]] = {key: set() for kind in (Measurement, Search, Rounding) for key, in db.tally(kind, "kernel")}
    for line in locked:
        names.setdefault(line.kernel, set()).add(line.name)
    for k, _ in db.select(KernelRecord):
        names.setdefault(k.kernel, set()).add(k.name)
    for c, _ in db.pair_times():
        names.setdefault(c.kernel, set()).add(c.described)
    if (key := _only_match(text, names, origins_of(db))) is not None:
        return key
    elsewhere = {k.kernel: {k.name} for k, _ in db.select(KernelRecord, shipped=True) if k.kernel.startswith(text)} if shipped else {}
    elsewhere |= {c.kernel: {c.described} for c, _ in db.pair_times(shipped=True) if c.kernel.startswith(text)} if shipped else {}
    if (key := _only_match(text, elsewhere, {})) is not None:
        return key
    if not names:
        check_is_there(db.plan)
    raise DatabaseError(f"no kernel in the database has a key that starts with {text!r}, or a name or origin that contains it; "
                        f"`svod-db list` shows the {len(names)} there are")


def _only_match(text: str, names: Mapping[str, set[str]], origins: Mapping[str, Sequence[str]]) -> str | None:
    """The key of the kernel that `text` means, or None. `names`, `origins`: key → the names and the origins of each kernel to choose
    from. Raises DatabaseError if `text` may mean several kernels."""
    kinds = ({k for k in names if k == text}, {k for k in names if k.startswith(text)}, _with(names, text, whole=True),
             _with(origins, text, whole=True), _with(names, text, whole=False), _with(origins, text, whole=False),
             _with(names, re.sub(r"_\d+$", "", text), whole=True))
    for matches in kinds:
        if len(matches) == 1:
            return matches.pop()
        if matches:
            shown = ", ".join(sorted(f"{k[:SHOWN_KEY]} ({', '.join(sorted(names[k])) or 'no name'})" for k in matches)[:8])
            raise DatabaseError(f"{text!r} means {len(matches)} kernels: {shown}{' …' if len(matches) > 8 else ''}; give more of the key")
    return None


def _with(texts: Mapping[str, Collection[str]], text: str, *, whole: bool) -> set[str]:
    """The keys of `texts` with an entry that equals `text`, or, without `whole`, with an entry that contains it."""
    return {key for key, own in texts.items() if (text in own if whole else any(text in x for x in own))}


def _report(skipped: list[Skipped]) -> None:
    for s in skipped[:10]:
        _say(f"skipped {s.where}: {s.reason}", err=True)
    if len(skipped) > 10:
        _say(f"skipped {len(skipped) - 10} more", err=True)


def _print_json(value: Any) -> None:
    _say(json.dumps(value, indent=2))


@cli.command("list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--from", "origin", metavar="TEXT", help="Only kernels that come from a place with TEXT in it: a script, a module's path.")
@click.option("--target", metavar="TEXT", help="Only targets with TEXT in their key.")
@click.option("--gain", type=Number("times", min=0.0), metavar="X",
              help="Only chains at least X times as fast as the heuristic's, as in 1.1.")
@click.option("--sort", "order", type=click.Choice(get_args(Order)), default="time", show_default=True,
              help="First those that take most time in a run of their program, with the greatest gain, that save most of the time, "
                   "by name, or searched last.")
@click.option("--objects", is_flag=True, help="List compiled objects by the machines that they fit instead: in the directories NAMEs, or "
                                              "in those of SVOD_OBJECT_CACHE.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
@click.pass_context
def list_kernels(context: click.Context, names: tuple[str, ...], origin: str | None, target: str | None, gain: float | None, order: Order,
                 objects: bool, as_json: bool) -> None:
    """List kernels and the chains in use: all of them, or those whose names fit NAMEs, which are patterns such as 'gemm*'."""
    if objects:
        kept = config.object_cache_dirs(config.PrepareConfig.env_value("object_cache"))
        _list_objects([Path(n).absolute() for n in names] or kept, as_json)
        return
    db = _open(context, missing=False)
    every = winner_rows(db)
    rows = in_order(chosen(every, names=names, origin=origin, target=target, least=gain), order)
    _say_empty(db, bool(every))
    if as_json:
        _print_json([r._asdict() for r in rows])
    elif every and not rows:
        _say(f"none of the {count(len(every), 'kernel')} fits; svod-db list without filters shows them", err=True)
    elif rows:
        print_rows(rows)
    _report(db.skipped)


def _list_objects(directories: Sequence[Path], as_json: bool) -> None:
    rows = object_rows(directories)
    problems = problems_of(directories, rows)
    if as_json:
        _print_json([r._asdict() for r in rows])
    elif rows:
        _say("\n".join(described_objects(rows)))
    for problem in problems if directories else [f"SVOD_OBJECT_CACHE is {config.NONE}; name a directory"]:
        _say(problem, err=True)


def _say_empty(db: TuningDB, has_kernels: bool) -> None:
    """Say on stderr if the database has no kernels, and how to tune some."""
    if not has_kernels:
        paths = [path for path in (db.plan.write, *db.plan.read) if path is not None]
        where = f"no kernels in {paths[0]}" if paths else f"the database is {config.NONE}"
        _say(f"{where}; {how_to_fill(db.plan)}", err=True)


def _complete_kernel(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions of a typed text: the names and the keys of kernels that begin with it."""
    db = _open(context.find_root())
    kernels = sorted({(k.kernel, k.name) for k, _ in db.select(KernelRecord)})
    texts = {name: key[:SHOWN_KEY] for key, name in kernels} | {key[:SHOWN_KEY]: name for key, name in kernels}
    return [CompletionItem(text, help=what) for text, what in texts.items() if text and text.startswith(incomplete)]


@cli.command()
@click.argument("kernel", shell_complete=_complete_kernel)
@click.option("--json", "as_json", is_flag=True, help="All records as one JSON object.")
@click.pass_context
def show(context: click.Context, kernel: str, as_json: bool) -> None:
    """Show all records of KERNEL, which is a key, the beginning of a key, or a name."""
    db = _open(context)
    key = _resolve_kernel(db, kernel, shipped=True)
    descriptions = [k for k, _ in db.select(KernelRecord, key, shipped=True)]
    found = db.select(Measurement, key, shipped=True)
    verdicts = [v for v, _ in db.select(Verdict, key, shipped=True)]
    searches = [s for s, _ in db.select(Search, key)]
    roundings = [r for r, _ in db.select(Rounding, key, shipped=True)]
    forms, plans = ([x for x, _ in db.select(kind, key, shipped=True)] for kind in (FormTimes, PlanTimes))
    if as_json:
        measurements = [m for m, _ in found]
        _print_json({"kernel": key, "winners": [r._asdict() for r in winner_rows(db, key)], "origins": origins_of(db, key)[key],
                     **{name: [r.to_json() for r in some] for name, some in (("descriptions", descriptions), ("measurements", measurements),
                                                                             ("verdicts", verdicts), ("searches", searches),
                                                                             ("roundings", roundings), ("form_times", forms),
                                                                             ("plan_times", plans))}})
        return
    newest = described(db, key, shipped=True).get(key)
    _say(f"kernel    {key}")
    if newest is not None:
        _say(f"name      {newest.name}\nwork      {newest.flops:.4g} flop, {newest.bytes:.4g} bytes")
    for origin in origins_of(db, key)[key]:
        _say(f"from      {origin}")
    for row in winner_rows(db, key):
        _show_target(db, row, [(m, layer) for m, layer in found if m.target == row.target], [v for v in verdicts if v.target == row.target])
    for line in describe_searches(searches):
        _say(line.replace("searched", "searched ", 1))
    for line in times_lines(db, key, None, Lock()):
        _say(line)
    for r in (r for choice in by_plan(roundings) for r in choice):
        _say(f"\nrounding  {r.target}\n          {rounding_words(r)}\n          {chain_words(r.chain)}")
    _report(db.skipped)


def _show_target(db: TuningDB, row: WinnerRow, found: Sequence[tuple[Measurement, int]], verdicts: Sequence[Verdict]) -> None:
    """Print a kernel's records for one target: the chain in use, its loops, and the twenty fastest chains. `found`: its measurements with
    their layers."""
    measurements, layers = [m for m, _ in found], {m.id: LAYER_NAMES[layer] for m, layer in found}
    told = {(v.linear, v.codegen): v.verdict for v in sorted(verdicts, key=lambda v: v.verdict != "verified")}
    counts = ", ".join(f"{n} {s}" for s, n in sorted(Counter(m.status for m in measurements).items()))
    _say(f"\ntarget    {row.target}\nrecords   {counts or 'none'}")
    _say("used      " + (f"the heuristic's chain: {row.why}" if row.chain is None else
                               f"{chain_words(row.chain)}  ({row.speedup:.2f}x the heuristic; {row.layer} layer)"))
    holder = db.claims.holder(row.kernel, row.target)
    if holder is not None:
        _say(f"searched  right now by process {holder.pid} on {holder.host}")
    used = next((m for m in measurements if m.id == row.measurement), None)
    for s in [s.named(used.variables) for s in used.sizes] if used is not None else ():
        _say(f"at        {s}: {seconds(s.seconds)}, {1 / s.ratio:.2f}x the heuristic")
    for line in _loops(db, row):
        _say(line)
    timed = [m for m in measurements if m.status == "ok"]
    best = sorted(timed, key=lambda m: (m.step != "confirm", m.ratio or 9.0, m.time or 9.0, m.id))[:20]
    if best:
        _say()
        print_with_chains(("step", "time", "of heuristic", "verdict", "code", "noisy", "layer"),
                          [(m.step, seconds(m.time), "" if m.ratio is None else f"{m.ratio:.3f}", told.get((m.linear, m.codegen), ""),
                            str(m.codegen), "yes" if m.noisy else "", layers[m.id]) for m in best], [chain_words(m.chain) for m in best],
                          right={"time", "of heuristic", "code"})


def _loops(db: TuningDB, row: WinnerRow) -> list[str]:
    """The lines of the kernel's loop nest under the chain in use, replayed with today's opts; else a line that says why there is none."""
    machine = target_with(row.target)
    if machine is None:
        return ["loops     are shown on a machine with this target"]
    record = described(db, row.kernel, shipped=True).get(row.kernel)
    if record is None:
        return ["loops     are not known: the database lacks the kernel's description"]
    try:
        state = Scheduler(Kernel(data_to_ast(record.ast)), machine)
        state = backend_named(machine.device).heuristic(state) if row.chain is None else \
            apply_opts(state, chain_of(row.chain))
        return ["", *print_nest(state).rstrip().split("\n")]
    except SvodError as e:
        return [f"loops     cannot be shown by this svod: {e}"]


def _runs_programs(*others: str) -> Callable[[click.Command], click.Command]:
    """Give a command the parameters of svod-tune that say how a script or an ONNX file is run, and `others` of its parameters."""
    def extended(command: click.Command) -> click.Command:
        command.params += [p for p in svod_tune.params if p.name in (*OF_PROGRAMS, *others)]
        return command
    return extended


def _lock_option() -> Callable[[Any], Any]:
    return click.option("--lock", metavar="FILE", type=click.Path(path_type=Path), help="A lock file of svod-tune -o instead of SVOD_LOCK.")


def _lock_in_use(given: Path | None) -> str | None:
    """The lock file that `given` or else SVOD_LOCK names, or None. Raises ConfigError if `given` does not exist."""
    if given is not None and not given.exists():
        raise ConfigError(f"the lock file {given} does not exist")
    lock = given or config.PrepareConfig.env_value("lock")
    return None if lock is None else str(lock)


@_runs_programs()
@cli.command()
@click.argument("what", metavar="SCRIPT|KERNEL")
@click.argument("args", nargs=-1, metavar="[SCRIPT ARGS]")
@click.option("--target", help="A target key; default: every target in the records, or the one the script was prepared for.")
@_lock_option()
@click.pass_context
def why(context: click.Context, /, what: str, args: tuple[str, ...], target: str | None, lock: Path | None, **program: Any) -> None:
    """Explain why kernels have their chains, or none: by the lock file, if there is one, else by the nearest record and the first field
    that differs; why convolutions are computed directly or by transforms; and what whole plans do otherwise than by the rules. The KERNEL
    may be a convolution or a plan.

    A SCRIPT, which may be an ONNX file, is run as svod-tune runs it to capture its kernels; nothing is searched or recorded."""
    db, used = _open(context), _lock_in_use(lock)
    if used is not None and (problem := problem_of_lock(used)):
        _say(problem, err=True)
    if what.endswith((".py", ".onnx")) or Path(what).is_file():
        options = TuneOptions(what, args, **program)
        check_program(options)
        captured = captured_program(options)
        wanted = captured.kernels
        if captured.failure:
            _say(f"{what}: {captured.failure}; these are the kernels up to there", err=True)
        for text in program_lines(db, captured, target, used):
            _say(text)
    elif args or any(program.values()):
        raise click.UsageError(f"{what} is no script; arguments and {', '.join(OF_PROGRAMS.values())} are for scripts")
    else:
        lock_lines = read_lock(used) if used else Lock()
        key = _resolve_kernel(db, what, shipped=True, locked=lock_lines.lines)
        told = times_lines(db, key, target, lock_lines)
        for text in told:
            _say(text)
        names = {line.target: line.name for line in lock_lines.lines if line.kernel == key}
        chose = (r.target for r, _ in db.select(Rounding, key, shipped=True))
        targets = [target] if target else dict.fromkeys([*(r.target for r in winner_rows(db, key)), *chose, *names])
        wanted = [] if told else [CapturedKernel(key, t, names.get(t, ""), "") for t in targets]
    for c in wanted:
        _say("\n".join(reason_lines(db, c._replace(target=target or c.target), used)))
    _report(db.skipped)


@_runs_programs("script", "args", "module")
@cli.command()
@click.option("-o", "--output", metavar="DIRECTORY", type=click.Path(file_okay=False, path_type=Path), required=True,
              help="Where the objects are kept; those that it has stay.")
@_lock_option()
@click.pass_context
def bake(context: click.Context, /, output: Path, lock: Path | None, **given: Any) -> None:
    """Fill a directory with the compiled kernels of SCRIPT, which may be an ONNX or a .pt2 file, to be shipped with it: run it once, with
    the chains that it has with today's lock file and database, and keep the objects in DIRECTORY.

    SVOD_OBJECT_CACHE names the directory where the program is used. The exit status is 1 where the script failed."""
    if context.obj is not None:
        _open(context, missing=False)
    options = options_of(**given)
    check_program(options)
    if (used := _lock_in_use(lock)) is not None:
        check_whole(used)       # what is shipped has all of its lines
    variables = {name: str(value) for name, value in (("SVOD_LOCK", lock and lock.absolute()), ("SVOD_TUNE_DB", context.obj)) if value}
    baked = bake_objects(options, output, **variables)
    _say("\n".join(described_objects(object_rows([output.absolute()]))))
    _say(f"{options.subject}: {count(baked.made, 'object')} made, {baked.known} of the objects that it uses were there already")
    if baked.failure:
        _say(f"{options.subject}: {baked.failure}; these are the objects up to there", err=True)
        sys.exit(EXIT_SKIPPED)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def stats(context: click.Context, as_json: bool) -> None:
    """Count the user's records and show where they are."""
    db = _open(context, missing=False)
    statuses, places = Counter[str](), set[tuple[str, str]]()
    for (kernel, target, status), n in db.tally(Measurement, "kernel", "target", "status").items():
        statuses[status] += n
        places.add((kernel, target))
    searched, searches = db.tally(Search, "kernel", "target"), db.tally(Search, "search")
    pairs = places | searched.keys()
    winners = [ranking[0] for ranking in db.all_rankings().values() if ranking]
    path = db.plan.write
    facts: dict[str, Any] = {
        "written": str(path or "memory"), "bytes": path.stat().st_size if path is not None and path.exists() else 0,
        "read": [str(p) for p in db.plan.read], "shipped": [str(p) for p in db.plan.shipped],
        "kernels": len({k for k, _ in pairs}), "targets": sorted({t for _, t in pairs}),
        "target_descriptions": db.tally(TargetFacts).total(), "winners": len(winners),
        "winners_by_layer": dict(Counter(LAYER_NAMES[w.layer] for w in winners)), "measurements": statuses.total(),
        "measurements_by_status": dict(statuses.most_common()),
        "verdicts": {verdict: n for (verdict,), n in db.tally(Verdict, "verdict").items()}, "searches": len(searches),
        "roundings": db.tally(Rounding).total(), "plans_that_chose_roundings": len(db.tally(Rounding, "target", "plan")),
        "form_times": db.tally(FormTimes).total(), "convolutions_timed": len(db.tally(FormTimes, "kernel", "target")),
        "plan_times": db.tally(PlanTimes).total(), "plans_timed": len(db.tally(PlanTimes, "kernel", "target")),
        "searched_without_a_winner": len(searched.keys() - {(w.kernel, w.target) for w in winners}),
        "skipped": len(db.skipped)}
    _say_empty(db, bool(pairs))
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        shown = ", ".join(f"{n} {k}" for k, n in sorted(value.items())) if isinstance(value, dict) else \
            "; ".join(value) if isinstance(value, list) else str(value)
        _say(f"{name.replace('_', ' '):27}{shown or '-'}")
    _report(db.skipped)


@cli.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The .jsonl file to write.")
@click.option("--winners", is_flag=True, help="Only the records that decide the winners: small enough to check in.")
@click.option("--anonymous", is_flag=True, help="Without names of people, machines, files and searches: fit to be published.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be repeated.")
@click.pass_context
def export(context: click.Context, output: Path, winners: bool, anonymous: bool, kernels: tuple[str, ...]) -> None:
    """Write records to a JSON Lines file that `import` reads on any machine."""
    check_output("-o", output, format=EXPORT_FORMAT)
    db = _open(context, missing=False)
    wanted = [_resolve_kernel(db, k) for k in kernels] if kernels else None
    count = moving.export(db, output, wanted, winners_only=winners, anonymous=anonymous)
    _say(f"{count} records written to {output}")
    _report(db.skipped)


@cli.command("import")
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE...")
@click.pass_context
def import_files(context: click.Context, sources: tuple[Path, ...]) -> None:
    """Add the records of JSON Lines files.

    Malformed or truncated records are reported and skipped; the others are added, and the exit status is 1. A file without tuning records
    is refused with status 2."""
    db = _open(context, read_only=False)
    _add(db, sources, moving.import_file)


@cli.command()
@click.argument("others", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="OTHER.db...")
@click.pass_context
def merge(context: click.Context, others: tuple[Path, ...]) -> None:
    """Add the records of other databases to this one. Merging twice, or in another order, gives the same database.

    The exit status is that of import."""
    db = _open(context, read_only=False)
    _add(db, others, moving.merge)


def _add(db: TuningDB, sources: tuple[Path, ...], add: Callable[[TuningDB, Path], Merged]) -> None:
    skipped = 0
    for path in sources:
        merged = add(db, path)
        _say(f"{path}: {merged.added} new records, {merged.known} known"
                   f"{f', {len(merged.skipped)} skipped' if merged.skipped else ''}; in {db.path}")
        _report(merged.skipped)
        skipped += len(merged.skipped)
    if skipped:
        sys.exit(EXIT_SKIPPED)


@cli.command()
@click.argument("kernel")
@click.option("--target", help="Only on this target; default: on all.")
@click.option("--linear", help="Only this LINEAR digest; default: every chain that was confirmed.")
@click.option("--reason", default="", help="Why; kept for later readers.")
@click.option("--undo", is_flag=True, help="Take earlier retractions back.")
@click.pass_context
def retract(context: click.Context, kernel: str, target: str | None, linear: str | None, reason: str, undo: bool) -> None:
    """Never use the chains recorded for KERNEL again (until the code generator changes), whatever is merged later. --undo takes earlier
    retractions back, here and wherever this database is merged into; chains with wrong numbers stay barred."""
    db = _open(context, read_only=False)
    key = _resolve_kernel(db, kernel, shipped=True)
    count = db.restore(key, target, linear, reason) if undo else db.retract(key, target, linear, reason)
    if not count:
        what, has = ("restore", "retracted") if undo else ("retract", "confirmed")
        raise DatabaseError(f"nothing to {what}: {key[:SHOWN_KEY]} has no {has} chain" + (f" on {target}" if target else "")
                            + (f" with LINEAR {linear}" if linear else ""))
    _say(f"{count} chain{'s' * (count != 1)} of {key[:SHOWN_KEY]} {'may be used again' if undo else 'retracted'}")


@cli.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--all", "every", is_flag=True, help="Also chains that were measured here before.")
@click.option("--budget", type=Number("seconds", min=1.0), default=600.0, show_default=True, help="Most seconds.")
@click.pass_context
def verify(context: click.Context, kernels: tuple[str, ...], every: bool, budget: float) -> None:
    """Check the chains of others on this machine, numbers and time, as their first use would: all of them, or those for KERNELs.

    What is measured is recorded. The exit status is 1 where a chain is not used: it is wrong, slower than the heuristic, or fails here."""
    from svod.cli.db.verify import print_checked  # imported here, as only this command needs workers
    from svod.cli.db.verify import verify as check
    db = _open(context, read_only=False)
    rows = check(db, {_resolve_kernel(db, k, shipped=True) for k in kernels}, budget, every=every)
    if not rows:
        _say("the database has no chain for this machine" if every else "nothing is left to check: every chain in use was measured here")
        return
    refused = print_checked(rows)
    if db.plan.write is not None and db.path is None and not db.storage.store_again():
        raise DatabaseError(f"what was measured is not recorded: {db.problem or 'the database cannot be written'}")
    if refused:
        sys.exit(EXIT_SKIPPED)


@cli.command()
@click.pass_context
def rekey(context: click.Context) -> None:
    """Give the records of kernels today's keys, where svod has made them differently since. Old records stay."""
    from svod.tune.rekey import rekey as give_keys
    db = _open(context, read_only=False, missing=False)
    done = give_keys(db)
    _say(f"{count(done.kernels, 'kernel')} {'have' if done.kernels != 1 else 'has'} another key today; {done.records} records added")
    for key, why in done.failed[:10]:
        _say(f"{key[:SHOWN_KEY]} has no key today: {why}", err=True)
    _report(db.skipped)
    if done.failed:
        sys.exit(EXIT_SKIPPED)


@cli.command()
@click.option("--older-than", "days", type=Number("days", min=0), default=90.0, show_default=True, help="Age in days.")
@click.pass_context
def gc(context: click.Context, days: float) -> None:
    """Remove void claims and old measurements that can no longer decide anything, and make the file smaller."""
    db = _open(context, read_only=False, missing=False)
    if db.plan.write is None or not db.plan.write.exists():
        raise DatabaseError(f"there is no database at {db.plan.write or config.NONE}")
    collected = moving.gc(db, days * 86400.0)
    _say(f"{collected.measurements} measurements and {collected.claims} void claims removed")
