"""The command line of svod-tune: its options and their checks. `run.py`, imported after the first line of output, does the work."""
from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import sys
import zipfile
from typing import Any, NoReturn

import click

from svod import config
from svod.cli.outputs import CountType, Number, check_database, check_output
from svod.cli.tune.options import DEFAULT_BEAM, DEFAULT_BUDGET, LOCK_FORMAT, REPORT_FORMAT, TORCH, TuneOptions
from svod.cli.tune.waiting import say
from svod.core.machine.target import FAST, POLICIES
from svod.system.process.directories import working_directory
from svod.tune.db.transfer import CAPTURE_FORMAT

SCRIPT_OPTIONS = "options of the script go after --, as in: svod-tune {script} -- {option}"


class _TuneCommand(click.Command):
    """A command that explains where the script's own options go when it meets an unknown one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            script = next((a for a in given if a.endswith(".py")), "SCRIPT")
            hint = SCRIPT_OPTIONS.format(script=script, option=e.option_name)
            raise click.UsageError(f"{e.format_message().rstrip('.')}; {hint}", ctx) from e


SECONDS = Number("seconds", min=0.0, min_open=True, max=1e7)


@click.command(cls=_TuneCommand, context_settings={"help_option_names": ["-h", "--help"]},
               epilog="Exit status: 0 tuned, or nothing was left to do; 1 the search could not be carried out, or the budget was over "
                      "before it; 2 bad input; 3 the script failed, and what it had prepared was tuned; 4 tuned, but the database could "
                      "not take the results, or a file that was asked for could not be written; 5 there is no kernel to tune; 6 the "
                      "capture is damaged, and what can be read of it was tuned; 130 ended early by Ctrl-C; 143 ended by SIGTERM, 129 by "
                      "SIGHUP. The first Ctrl-C ends the script, the next one the tuning.")
@click.argument("script", required=False, type=click.Path())
@click.argument("args", nargs=-1, metavar="[SCRIPT ARGS]")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does, instead of a script.")
@click.option("--beam", type=CountType(min=1, hint="to see what would be tuned use --dry-run"), metavar="N",
              help=f"Beam width, at least 1; default: BEAM, else {DEFAULT_BEAM}.")
@click.option("--budget", type=SECONDS, default=DEFAULT_BUDGET, show_default=True, help="Wall seconds of the "
              "script (at most half), the search and the plan check together. What a script takes beyond half until its first plan, and "
              "--capture-for, come on top, as do at most 15 s to end, or the step under way where that takes longer.")
@click.option("--workers", default="ray", show_default=True, metavar="ray:N|local:N|inline",
              help="Who compiles and times candidates; without N one worker per core. Where Ray does not come up, "
                   "and for budgets below 20 s (but for ray:N), local ones do.")
@click.option("--address", metavar="auto|HOST:PORT", help="A running Ray cluster instead of a Ray of our own.")
@click.option("--target", multiple=True, metavar="T", help="Tune for a machine of the cluster: its target's key, or a part of it "
              "that no other has. May be repeated; default: this machine's, or the only one present.")
@click.option("--device", metavar="NAME", help="The device to tune for, such as WEBGPU; default: SVOD_DEVICE, else CPU.")
@click.option("--numerics", type=click.Choice(POLICIES), help="How results may differ from chain to chain; default: SVOD_NUMERICS, else "
              "that of the script or the capture. With same, all chains compute the same bits; with fast, products of float32 may round "
              "their factors to bfloat16, as far as --max-error allows.")
@click.option("--max-error", type=Number("", min=0.0), metavar="E", help="With --numerics fast: the largest error of an output, "
              "over its largest value in float32. After the search the program runs once more, and the kernels to round are chosen by the "
              "inputs of its first run.")
@click.option("--db", metavar="PATHS", help="Databases instead of SVOD_TUNE_DB: the first is written, all are read.")
@click.option("--resume", is_flag=True, help="Search only kernels whose last search was ended by its budget, Ctrl-C, an error or a kill.")
@click.option("--fresh", is_flag=True, help="Read nothing that is in the database; record what is found.")
@click.option("--top", type=CountType(min=1), metavar="N", help="Only the N kernels that take most of the time.")
@click.option("--only", multiple=True, metavar="KEY", help="Only kernels whose key begins with KEY, or whose name or origin has it.")
@click.option("--capture-for", type=SECONDS, help="End the script after this time; without it, after half of the budget, "
              "or before that after 30 s without a new kernel.")
@click.option("--from", "source", metavar="FILE", type=click.Path(),
              help="Tune a capture (a file or directory) instead of running a script.")
@click.option("--capture-to", metavar="FILE", type=click.Path(), help="Also keep the capture, for --from here or elsewhere.")
@click.option("--actions", type=click.Choice(["default", "reference"]), help="The grid of single opts that is proposed.")
@click.option("--strategy", type=click.Choice(config.STRATEGIES), help="Who proposes candidates; default: BEAM_STRATEGY, else beam.")
@click.option("--optuna-storage", metavar="URL", help="Also write the studies of --strategy optuna here, for optuna-dashboard; for example "
              "sqlite:///studies.db.")
@click.option("--dim", multiple=True, metavar="NAME=SIZE", help="Of an ONNX file: the size of a free dimension, or a range, as in "
              "sequence=1..512, for which one plan serves. A free first axis that is called batch, or has no name, is 1 without it.")
@click.option("--shape", multiple=True, metavar="INPUT=1x3x224x224", help="Of an ONNX file: the shape of an input.")
@click.option("--inputs", metavar="FILE.npz", type=click.Path(exists=True, dir_okay=False),
              help="Of an ONNX file: its inputs, by their names.")
@click.option("--random-weights", is_flag=True, help="Of an ONNX file: random numbers for weights that it computes from constants.")
@click.option("--outputs", multiple=True, metavar="NAME,NAME", help="Of an ONNX file: the values to compute, which may be any in it.")
@click.option("--fallback", type=click.Choice(("onnxruntime", "reference")), help="Of an ONNX file: what runs the operators that svod does "
              "not have, and what stands behind them.")
@click.option("--torch", type=click.Choice(TORCH), help="PyTorch in the script: compile, the default where the script imports it: "
              "torch.compile without a backend means svod; modules: outermost modules are compiled too; off: it runs as it is.")
@click.option("--dry-run", is_flag=True, help="Show kernels, families, estimates and what the database knows; search nothing.")
@click.option("--compile-only", is_flag=True, help="Compile every kernel's heuristic and sketches for the device, which need not be there, "
              "as in SVOD_DEVICE=CUDA:sm_90; time nothing. The script runs on the CPU.")
@click.option("-o", "--lock", "lock_path", metavar="FILE", type=click.Path(),
              help="Also write the chains to a lock file, which SVOD_LOCK and PrepareConfig(lock=…) use; for example model.lock.jsonl.")
@click.option("--json", "json_path", metavar="PATH", type=click.Path(allow_dash=True),
              help="Write everything to a JSON file; - is the standard output, and the script's goes to stderr.")
@click.option("--log-json", metavar="FILE", type=click.Path(allow_dash=True),
              help="Append what happens in the search to a file, one JSON object a line as it happens; - is stderr.")
@click.option("--verbose", is_flag=True, help="Say more: rounds, dropped candidates, the log.")
@click.version_option(package_name="svod", message="svod %(version)s")
def cli(beam: int | None, **given: Any) -> NoReturn:
    """Run SCRIPT, capture the kernels it prepares, tune and verify them, and remember the winners. SCRIPT may be an ONNX file,
    or a program that torch.export has saved (.pt2) with its example inputs.

    Options may stand before and after SCRIPT; everything after -- is the script's own."""
    if beam is None:
        beam = config.BeamConfig.env_value("width") or DEFAULT_BEAM
    options = options_of(beam=beam, **given)
    check(options)
    logging.getLogger("svod").addHandler(_log_handler(options.verbose))
    say(first_line(options))
    from svod.cli.tune.run import tune

    sys.exit(tune(options))


def first_line(options: TuneOptions) -> str:
    if options.source is not None:
        return f"svod-tune: reading the capture {options.source}"
    return f"svod-tune: running {options.subject} to capture its kernels (Ctrl-C ends the script and tunes what it has prepared)"


def options_of(**given: Any) -> TuneOptions:
    """The options that click's parameters give. The first argument behind a module is the module's own."""
    if given["module"] is not None and given["script"] is not None:
        given["script"], given["args"] = None, (given["script"], *given["args"])
    return TuneOptions(**given)


def check_program(options: TuneOptions) -> None:
    """Raise click.UsageError unless there is one program or capture, which the options fit."""
    if options.source is not None:
        if options.program:
            raise click.UsageError(f"both a program ({options.script or options.module}) and a capture (--from {options.source}) were "
                                   "given; give one")
        if not os.path.exists(options.source):
            raise click.BadParameter(f"{options.source} does not exist; make a capture with svod-tune --capture-to FILE SCRIPT",
                                     param_hint="--from")
    elif options.module is not None:
        _check_module(options.module)
    elif options.script is None:
        raise click.UsageError("no script was given; give SCRIPT or -m MODULE; svod-tune also takes a capture, as --from FILE")
    else:
        _check_script(options.script, options.is_onnx)
    if not options.is_onnx and options.of_onnx:
        raise click.UsageError(f"{', '.join(options.of_onnx)}: only for ONNX files, as in model.onnx --dim sequence=128")
    if options.is_onnx and options.torch:
        raise click.UsageError("--torch: only for scripts, which may import PyTorch; an ONNX file does not")


def check(options: TuneOptions) -> None:
    """Raise click.UsageError for options that exclude each other, and another error for options that cannot be used."""
    check_program(options)
    check_output("--json", options.json_path, options.script, options.source, stdout=True, format=REPORT_FORMAT)
    if options.compile_only and options.dry_run:
        raise click.UsageError("--compile-only compiles, and --dry-run only looks; give one")
    _check_policy(options)
    if options.resume and options.fresh:
        raise click.UsageError("--resume goes on from what the database has, and --fresh reads none of it; give one")
    check_output("--lock", options.lock_path, options.script, options.source, format=LOCK_FORMAT)
    check_output("--log-json", options.log_json, options.script, options.source, stdout=True)
    check_output("--capture-to", options.capture_to, options.script, options.source, format=CAPTURE_FORMAT)
    check_database(None if options.dry_run else options.db)
    strategy = options.strategy or config.BeamConfig.env_value("strategy")
    if options.optuna_storage is not None and strategy != "optuna":
        raise click.UsageError(f"--optuna-storage is for --strategy optuna; the strategy is {strategy}")
    from svod.tune.search.strategies.registry import check_strategy
    from svod.tune.workers.start import check_address, parse_workers

    check_strategy(strategy, options.optuna_storage or config.BeamConfig.env_value("optuna_storage"),
                   config.BeamConfig.env_value("cost_model"))

    name, _ = parse_workers(options.workers)
    check_address(options.address)
    if options.address is not None and name != "ray":
        raise click.UsageError(f"--address {options.address} needs Ray workers; --workers {options.workers} are none")


def _check_policy(options: TuneOptions) -> None:
    """Raise click.UsageError for a limit of errors without the policy that it belongs to, or without a program to run."""
    if options.max_error is None:
        return
    if (options.numerics or config.PrepareConfig.env_value("numerics")) != FAST:
        raise click.UsageError("--max-error is the limit of --numerics fast; give both")
    if options.source is not None:
        raise click.UsageError("--max-error needs the program, whose outputs it compares; a capture (--from) has no weights and no inputs")
    if options.address is not None or options.compile_only:
        raise click.UsageError("--max-error runs the program on this machine; leave out --address and --compile-only")


_PROGRAMS = "give the path of a Python script, of an ONNX file, or of a .pt2 file that torch.export has saved"


def _check_script(script: str, is_onnx: bool) -> None:
    """Raise click.UsageError for an argument that is neither a program to run nor a file with one."""
    if not os.path.isfile(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        problem = "is a directory without a __main__.py" if os.path.isdir(script) else "does not exist"
        raise click.UsageError(f"{script} {problem}; {_PROGRAMS}")
    if not os.access(script, os.R_OK):
        raise click.UsageError(f"{script} cannot be read")
    if is_onnx and importlib.util.find_spec("onnx") is None:
        raise click.UsageError(f"{script} needs the package onnx, which is not installed; pip install 'svod[onnx]'")
    if not is_onnx and not script.endswith(".pt2") and os.path.isfile(script) and _is_data(script):
        raise click.UsageError(f"{script} is no text and no program; {_PROGRAMS}")


def _is_data(path: str) -> bool:
    """Whether a file is one that Python cannot run, such as saved weights: neither text nor a compiled module nor an archive with a
    program."""
    with open(path, "rb") as f:
        begins = f.read(1 << 10)
    if b"\0" not in begins or begins.startswith(importlib.util.MAGIC_NUMBER):
        return False
    if not zipfile.is_zipfile(path):
        return True
    with zipfile.ZipFile(path) as archive:
        return "__main__.py" not in archive.namelist()


def _check_module(name: str) -> None:
    """Raise click.BadParameter for a module that `python -m` would not find in the current directory or on the path."""
    finder = importlib.machinery.PathFinder()
    top = name.partition(".")[0]
    if finder.find_spec(top, [str(working_directory() or os.sep), *sys.path]) is None:
        raise click.BadParameter(f"there is no module {top!r} here or on Python's path", param_hint="-m")


def _log_handler(verbose: bool) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("svod: %(message)s"))
    handler.setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("svod").setLevel(logging.INFO if verbose else logging.WARNING)
    return handler
