"""HTML pages that open offline: how their templates are filled in, and the style sheet that they share, `templates/look.css`."""
from __future__ import annotations

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

#: The space between a number and its unit, or within a number: no line breaks there.
_IN_QUANTITY = re.compile(r"(?<=\d) (?=[GMkTµmn]?(?:FLOP|B|iB|s|min|h|%)|\d{3}\b)")


def environment(package: str, escape: bool = True) -> Environment:
    """Templates of a package's folder `templates`, beside those of this one. `escape`: for HTML, where values are escaped and quantities
    have no line breaks. A name that a template does not know is an error."""
    return Environment(loader=ChoiceLoader([PackageLoader(package), PackageLoader("svod.system")]), autoescape=escape,
                       undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_no_break if escape else None)


def _no_break(value: object) -> object:
    """The text of an expression in a page: empty for None, without line breaks within a quantity."""
    if value is None:
        return ""
    return _IN_QUANTITY.sub("\u00a0", value) if isinstance(value, str) and not isinstance(value, Markup) else value
