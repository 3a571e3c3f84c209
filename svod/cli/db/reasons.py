"""Explains why a kernel has its chain, for `svod-db why`: first by the lock file, then by the tuning database, as `prepare` asks them."""
from __future__ import annotations

from svod.cli.db.listing import SHOWN_KEY
from svod.cli.db.scripts import CapturedKernel
from svod.compile.backend import target_with
from svod.config import PrepareConfig
from svod.core.ir.serialize import data_to_ast
from svod.core.kernel.chain_text import AS_IT_IS, chain_text
from svod.core.kernel.kernel import Kernel
from svod.errors import SvodError
from svod.system.quantities import times
from svod.tune.chains import lock_fault
from svod.tune.db import TuningDB, described
from svod.tune.db.why import explain
from svod.tune.lock import locked_lines
from svod.tune.resolved import Resolved


def reason_lines(db: TuningDB, asked: CapturedKernel, lock: str | None) -> list[str]:
    """The lines about a kernel: its key and name, its target, and the reason for its chain. `lock`: the lock file, if one is used."""
    known = described(db, asked.kernel, shipped=True).get(asked.kernel)
    lines = [f"{asked.kernel[:SHOWN_KEY]} {asked.name or (known.name if known is not None else '')}", f"    {asked.target}"]
    if lock is not None:
        decides, text = _locked(db, asked if asked.ast is not None or known is None else asked._replace(ast=known.ast), lock)
        lines.append(f"    {text}")
        if decides:
            return lines
    reason = explain(db, asked.kernel, asked.target, structure=asked.structure)
    lines.append(f"    {reason.text}")
    if reason.field and reason.stored and reason.field != "verdict":
        lines.append(f"    first difference: {reason.field}; asked: {reason.asked or 'nothing'}; in the record: {reason.stored}")
    return lines


def _locked(db: TuningDB, asked: CapturedKernel, lock: str) -> tuple[bool, str]:
    """Whether the lock file gives the kernel its chain, and a sentence that says so, or why not."""
    lines = locked_lines(lock)
    line = lines.get((asked.kernel, asked.target))
    if line is None:
        others = sorted(target for kernel, target in lines if kernel == asked.kernel)
        return False, f"the lock file {lock} has no chain for it" + (f" on this target, but on {', '.join(others)}" if others else "")
    problem, target = None, target_with(asked.target)
    if target is not None and asked.ast is not None:
        try:
            config = PrepareConfig.from_env(beam=None, capture=None, lock=lock)
            problem = lock_fault(Kernel(data_to_ast(asked.ast)), line.chain, Resolved.of(config, target, db))
        except SvodError as e:
            problem = f"cannot be checked: {e}"
    chain = chain_text(line.chain) or AS_IT_IS
    if problem is not None:
        return False, f"the chain of the lock file {lock} is not used: it {problem} ({chain})"
    gain = "" if line.gain is None else f" ({times(line.gain)} the heuristic when it was tuned)"
    return True, f"the lock file {lock} has its chain, which goes before the tuning database: {chain}{gain}"
