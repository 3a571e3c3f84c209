"""Explains why a kernel has its chain, for `svod-db why`: first by the lock file, then by the tuning database, as `prepare` asks them."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from svod.cli.db.listing import SHOWN_KEY
from svod.cli.db.scripts import CapturedKernel, CapturedProgram
from svod.compile.backend import backend_named, device_named, target_with
from svod.config import PrepareConfig
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.apply import is_rounded
from svod.core.kernel.chain_text import AS_IT_IS, NO_ALGORITHM, algorithm_words, chain_text, chain_words
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import FAST, HOST
from svod.errors import SvodError
from svod.system.quantities import digits, times
from svod.tune.chains import foreign_fault
from svod.tune.db import FormTimes, PairTimes, PlanTimes, Rounding, TuningDB, described
from svod.tune.db.records import KernelRecord, Measurement
from svod.tune.db.why import explain, measured_algorithms
from svod.tune.fast.report import HOW_TO_CHOOSE, by_plan, rounding_words
from svod.tune.lock import Lock, locked_lines, read_lock
from svod.tune.plans.forms import ConvolutionForm, decided_form, decided_words, disbelief
from svod.tune.plans.pair_times import alternative_lines, chosen_words, deciding_record, fault, locked_records, times_words
from svod.tune.resolved import Resolved

LIBRARY_KERNEL = "a library kernel, whose loops are written by hand: it has one form, and no chain to choose"


def reason_lines(db: TuningDB, asked: CapturedKernel, lock: str | None) -> list[str]:
    """The lines about a kernel: its key and name, its target, and the reason for its chain. `lock`: the lock file, if one is used."""
    known = described(db, asked.kernel, shipped=True).get(asked.kernel)
    lines = [f"{asked.kernel[:SHOWN_KEY]} {asked.name or (known.name if known is not None else '')}", f"    {asked.target}"]
    here: list[Rounding] = []
    if _is_library_kernel(asked, known):
        return [*lines, f"    {LIBRARY_KERNEL}"]
    if lock is not None:
        here = [x.record for x in read_lock(lock).roundings if (x.kernel, x.target) == (asked.kernel, asked.target)]
        decides, text = _locked(db, asked if asked.ast is not None or known is None else asked._replace(ast=known.ast), lock, here)
        lines += [f"    {text}", *(f"    by the lock file, {line}" for line in _rounding_lines(here))]
        if decides:
            return lines
    reason = explain(db, asked.kernel, asked.target, structure=asked.structure)
    lines.append(f"    {reason.text}")
    lines += [f"    algorithms {text}" for text in _algorithms(db, asked, known) if text]
    stored = [r for r, _ in db.select(Rounding, asked.kernel, asked.target, shipped=True)]
    lines += [f"    {line}" for line in _rounding_lines(stored) or ([] if here else _without_roundings(asked, known))]
    if reason.field and reason.stored and reason.field != "verdict":
        lines.append(f"    first difference: {reason.field}; asked: {reason.asked or 'nothing'}; in the record: {reason.stored}")
    return lines


def program_lines(db: TuningDB, captured: CapturedProgram, target: str | None, lock: str | None) -> list[str]:
    """The lines about a program's convolutions and plans. `target`: the target that is asked for instead of the program's own."""
    forms = {(f.form, f.target): f for f in captured.forms}
    lines = [form_line(db, f.content, target or f.target, lock) for f in forms.values()]
    for plan, at in captured.plans.items():
        if target in (None, at):
            lines += plan_lines(db, plan, at, [f.content for f in captured.forms if f.of == plan], lock)
    return lines


def form_line(db: TuningDB, form: ConvolutionForm, target: str, lock: str | None) -> str:
    """The form of a convolution in a program, and by what it is chosen. `form`: its predicted form."""
    here = target_with(target)
    if here is None:
        return f"{form.key[:SHOWN_KEY]} {form.words}"
    resolved = Resolved.of(PrepareConfig.from_env(beam=None, capture=None, lock=lock), here, db)
    decided, barred = decided_form(form, resolved), db.barred(form.key, target)
    locked = locked_records(FormTimes, form.key, resolved)
    reasons = [fault(r, resolved.compiler.pair.revision, barred) or disbelief(r, None, lambda: form.is_open or form.is_transformed)
               for r in locked if decided.times not in locked]
    unused = [f"; the lock file's times are not used: {reason}" for reason in dict.fromkeys(filter(None, reasons))]
    return f"{form.key[:SHOWN_KEY]} {decided_words(form, decided)}{''.join(unused)}"


def plan_lines(db: TuningDB, plan: str, target: str, forms: Sequence[ConvolutionForm], lock: str | None) -> list[str]:
    """The lines about a plan of a program: what it does otherwise than by the rules, and which of its records decides; [] without records.
    `plan`: the digest of the plan by the rules; `forms`: the predicted forms of its convolutions."""
    here, lines_of_lock = target_with(target), Lock() if lock is None else read_lock(lock)
    if here is None:
        return times_lines(db, plan, target, lines_of_lock)
    resolved = Resolved.of(PrepareConfig.from_env(beam=None, capture=None, lock=lock), here, db)
    lines = times_lines(db, plan, target, lines_of_lock, [deciding_record(PlanTimes, plan, resolved)])
    if lines and any(decided_form(form, resolved).form.is_transformed != form.is_transformed for form in forms):
        lines.append("    no record of this plan is used: a convolution has another form than the predicted one, which makes another plan")
    return lines


def times_lines(db: TuningDB, key: str, target: str | None, lock: Lock,
                deciding: Sequence[PairTimes | None] | None = None) -> list[str]:
    """The lines about a convolution or a plan: what its two ways took on each target, or on `target`, and which has been the faster one;
    [] for the key of a kernel. `deciding`: the record that decides, or None if none of them does; None: that is not known."""
    locked = [(x.record, "by the lock file, ") for x in lock.times if x.kernel == key and target in (None, x.target)]
    known = [r for r, _ in locked]
    stored = [(f, "") for f, _ in db.pair_times(key, target, shipped=True) if f not in known]
    revision, lines = device_named(HOST)[1].revision, list[str]()
    for r, where in (*locked, *sorted(stored, key=lambda pair: -pair[0].taken_at)):
        lines += [f"{key[:SHOWN_KEY]} {r.described}"] if not lines else []
        reason = fault(r, revision, db.barred(key, r.target))
        if reason is None and deciding is not None and r not in deciding:
            reason = "another record goes before it" if any(deciding) else "SVOD_IMPORTED=ignore or SVOD_NOOPT leaves it out"
        lines += [f"    {r.target}", f"    {where}{chosen_words(r)}, {times_words(r)}"
                  + (f"; this is not used: {reason}" if reason else ""), *(f"      {line}" for line in alternative_lines(r))]
    return lines


def _rounding_lines(records: Sequence[Rounding]) -> list[str]:
    """Why a kernel is rounded, or not, in each plan that chose."""
    return [rounding_words(r) for choice in by_plan(records) for r in choice]


def _without_roundings(asked: CapturedKernel, known: KernelRecord | None) -> list[str]:
    """Why nothing is known about rounding a kernel under the policy "fast", if its AST is one of this svod; [] under another policy."""
    ast, target = _ast_of(asked, known), target_with(asked.target)
    if ast is None or target is None or target.numerics != FAST:
        return []
    try:
        base = Scheduler(Kernel(data_to_ast(ast)), target)
        if any(is_rounded(state.applied_opts) for state in backend_named(target.device).sketches(base)):
            return [f"it may be rounded, but stays in float32, as no plan has chosen its kernels to round yet; {HOW_TO_CHOOSE}"]
    except SvodError:
        return []
    return ["it stays in float32, as it has no product of float32 that instructions of this target compute from bfloat16"]


def _ast_of(asked: CapturedKernel, known: KernelRecord | None) -> Any:
    """A kernel's AST as data, of its own capture or of the database; None if neither has one."""
    return asked.ast if asked.ast is not None or known is None else known.ast


def _is_library_kernel(asked: CapturedKernel, known: KernelRecord | None) -> bool:
    """Whether a kernel's loops are written by hand; False for an AST of another svod."""
    ast = _ast_of(asked, known)
    try:
        return ast is not None and Kernel(data_to_ast(ast)).library_kernel is not None
    except SvodError:
        return False


def _algorithms(db: TuningDB, asked: CapturedKernel, known: KernelRecord | None) -> tuple[str, str]:
    """What the algorithms of a kernel took, by measurements, and what they are predicted to take; "" where there is one alone, or its AST
    is of another svod."""
    measured = measured_algorithms([m for m, _ in db.select(Measurement, asked.kernel, asked.target, shipped=True)])
    ast, target = _ast_of(asked, known), target_with(asked.target)
    if ast is None or target is None:
        return measured, ""
    try:
        return measured, predicted_algorithms(Scheduler(Kernel(data_to_ast(ast)), target))
    except SvodError:
        return measured, ""


def predicted_algorithms(base: Scheduler) -> str:
    """What the best sketch of each algorithm of a kernel is predicted to take, fastest first; "" where all compute alike."""
    backend, cycles = backend_named(base.target.device), dict[str, float]()
    for state in backend.sketches(base):
        name = algorithm_words(state.applied_opts)
        cycles[name] = min(cycles.get(name, math.inf), backend.cost(state).cycles)
    if set(cycles) <= {NO_ALGORITHM}:
        return ""
    return "predicted: " + ", ".join(f"{name} {digits(c)}" for name, c in sorted(cycles.items(), key=lambda item: item[1])) + " cycles"


def _locked(db: TuningDB, asked: CapturedKernel, lock: str, roundings: Sequence[Rounding]) -> tuple[bool, str]:
    """Whether the lock file gives the kernel its chain, and a sentence that says so, or why not. `roundings`: the file's choices whether to
    round the kernel."""
    lines = locked_lines(lock)
    line = lines.get((asked.kernel, asked.target))
    if line is None and (rounded := [r for r in roundings if r.used]):
        chains = " or ".join(dict.fromkeys(chain_words(r.chain) for r in rounded))
        return True, f"the lock file {lock} has its chain in a choice of kernels to round, which goes before the tuning database: {chains}"
    if line is None:
        others = sorted(target for kernel, target in lines if kernel == asked.kernel)
        return False, f"the lock file {lock} has no chain for it" + (f" on this target, but on {', '.join(others)}" if others else "")
    problem, target = None, target_with(asked.target)
    if target is not None and asked.ast is not None:
        try:
            config = PrepareConfig.from_env(beam=None, capture=None, lock=lock)
            problem = foreign_fault(Kernel(data_to_ast(asked.ast)), line.chain, Resolved.of(config, target, db))
        except SvodError as e:
            problem = f"cannot be checked: {e}"
    chain = chain_text(line.chain) or AS_IT_IS
    if problem is not None:
        return False, f"the chain of the lock file {lock} is not used: it {problem} ({chain})"
    gain = "" if line.gain is None else f" ({times(line.gain)} the heuristic when it was tuned)"
    return True, f"the lock file {lock} has its chain, which goes before the tuning database: {chain}{gain}"
