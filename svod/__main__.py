"""Runs the command-line tools: `python -m svod tune model.py` is `svod-tune model.py`. Without a tool it lists them."""
from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from svod.system.process import program
from svod.system.process.streams import errors

TOOLS = {"tune": "run a program, tune its kernels, remember the winners",
         "db": "look at the tuning database, move records between machines",
         "bench": "measure this machine, benchmark suites against other libraries, make reports"}


def main() -> NoReturn:
    """Run the tool that the first argument names. Exits with status 2 if there is no such tool."""
    given = program.command()
    name = given[1] if len(given) > 1 else "--help"
    if name in TOOLS:
        program.become([given[0], *given[2:]])
        importlib.import_module(f"svod.cli.{name}").main()
    asked = name in ("-h", "--help")
    lines = [*([] if asked else [f"svod: there is no tool {name!r}"]), "usage: python -m svod TOOL …", "",
             *(f"  {tool:7}{f'svod-{tool}:':13}{what}" for tool, what in TOOLS.items()), "", "python -m svod TOOL --help says more"]
    try:
        print("\n".join(lines), file=sys.stdout if asked else errors(), flush=True)
    except OSError as e:
        sys.exit(f"svod: the list of tools cannot be written: {e.strerror}")
    sys.exit(0 if asked else 2)


if __name__ == "__main__":
    main()
