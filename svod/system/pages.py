"""HTML pages that open offline: the environment of their templates, and their common style sheet `templates/look.css`."""
from __future__ import annotations

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Matches spaces that must not become line breaks: between a number and its unit, and within a number.
_IN_QUANTITY = re.compile(r"(?<=\d) (?=[GMkTµmn]?(?:FLOP|B|iB|s|min|h|%)|\d{3}\b)")


def environment(package: str, escape: bool = True) -> Environment:
    """A Jinja environment with the `templates` folders of a package and of svod.system. `escape`: for HTML; values are escaped, and
    quantities have no line breaks. Undefined names in a template raise an error."""
    return Environment(loader=ChoiceLoader([PackageLoader(package), PackageLoader("svod.system")]), autoescape=escape,
                       undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_no_break if escape else None)


def _no_break(value: object) -> object:
    """The text of an expression in a page: "" for None, and without line breaks within a quantity."""
    if value is None:
        return ""
    return _IN_QUANTITY.sub("\u00a0", value) if isinstance(value, str) and not isinstance(value, Markup) else value
