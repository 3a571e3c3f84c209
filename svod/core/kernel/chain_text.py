"""Chains of opts as text that can be parsed again: `UPCAST(o0, 8) STAGE(s1, root) TC(r0, vnni8)`."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from svod.core.kernel.opts import ALGORITHMS
from svod.core.kernel.scheduler import Opt
from svod.errors import KernelOptError

AS_IT_IS = "as it is"       # text for the empty chain
NO_ALGORITHM = "direct"     # text for chains that compute as the kernel says
_OPT = re.compile(r"\s*(\w+)\(\s*([^(),\s]+)\s*(?:,([^()]*))?\)\s*,?")     # runs in linear time on any text
_INT = re.compile(r"-?[0-9]{1,18}")


def opt_text(opt: Sequence[Any]) -> str:
    """The text of one opt, such as `ORDER(out, o1,o0)`. The opt may also be `[op, axis, arg]` from a record; one written by another version
    of svod may have more or fewer entries, and its text cannot be parsed again."""
    op, axis, *args = (*opt, "", "")[:max(2, len(opt))]
    arg = args[0] if len(args) == 1 else ",".join(map(str, args)) or None
    return str(Opt(op, "" if axis is None else axis, tuple(arg) if isinstance(arg, list) else arg))


def chain_text(chain: Sequence[Sequence[Any]]) -> str:
    """The text of a chain, such as `UPCAST(o0, 8) THREAD(o1, 2)`, from Opts or from the opts of a record; "" for no opts."""
    return " ".join(map(opt_text, chain))


def chain_words(chain: Sequence[Sequence[Any]]) -> str:
    """The text of a chain for people: "as it is" if it has no opts."""
    return chain_text(chain) or AS_IT_IS


def algorithm_words(chain: Sequence[Sequence[Any]]) -> str:
    """The text of the opts by which a chain computes otherwise than the kernel says, such as `WINOGRAD(out, 4)`; NO_ALGORITHM for none."""
    return chain_text([opt for opt in chain if opt[0] in ALGORITHMS]) or NO_ALGORITHM


def parse_chain(text: str) -> tuple[Opt, ...]:
    """Parse the text of a chain, as reports, tables and DEBUG=2 show it (`chain_text`, `chain_words`). Commas between opts are allowed.
    Raises KernelOptError if the text is not a chain."""
    if text.strip() == AS_IT_IS:
        return ()
    chain: list[Opt] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _OPT.match(text, at)
        if found is None:
            raise KernelOptError(f"{text[at:at + 40]!r} is not an opt; an opt is written UPCAST(o0, 8), and a chain is opts in a row")
        op, axis, arg = found.groups()
        chain.append(Opt(op, axis, _argument(arg)))
        at = found.end()
    return tuple(chain)


def chain_of(given: Sequence[Any] | str) -> tuple[Opt, ...]:
    """The opts of a chain in a form that `PrepareConfig.opts` and records take: text, or a sequence of [op, axis, argument]. Raises
    KernelOptError."""
    return parse_chain(given) if isinstance(given, str) else tuple(Opt.from_json(list(o)) for o in given)


def _argument(text: str | None) -> Any:
    """The argument of an opt: an int, a word, a tuple for words with commas between them, or None for an empty text."""
    if not text or not text.strip():
        return None
    words = tuple([int(w) if _INT.fullmatch(w) else w for w in (w.strip() for w in text.split(","))])
    return words if len(words) > 1 else words[0]
