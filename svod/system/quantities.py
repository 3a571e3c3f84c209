"""Formats quantities for people: three significant digits and a unit that keeps them short. An unknown quantity is a dash."""
from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = "–"


def count(n: int, what: str) -> str:
    """A number with a noun in singular or plural: `3 kernels`, `1 search`, `2 searches`."""
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def accepted_numbers(kind: str, low: float, high: float | None = None, above: bool = False) -> str:
    """The numbers of a range in words: `an integer, at least 1`; `a number of seconds, above 0 and at most 60`."""
    return f"{kind}, {'above' if above else 'at least'} {low:g}" + ("" if high is None else f" and at most {high:,.10g}")


def kind_of_number(unit: str) -> str:
    """What a number of a unit is called; without a unit it is a share."""
    return f"a number of {unit}" if unit else "a share (0.01 is 1 %)"


def digits(value: float, significant: int = 3) -> str:
    """Format `value` with `significant` digits and without an exponent: 1.23, 12.3, 123, 1 230."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if rounded and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        places -= 1     # rounding added a digit: 9.996 is shown as 10.0, not 10.00
    return f"{rounded:,.{max(0, places)}f}".replace(",", " ")


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Format `value` in the largest unit in which it rounds to at least 1."""
    for size, unit in units[:-1]:
        if round(abs(value) / size, 2 - math.floor(math.log10(abs(value) / size))) >= 1:
            return f"{digits(value / size)} {unit}"
    size, unit = units[-1]
    return f"{digits(value / size)} {unit}"


def seconds(value: float | None) -> str:
    """A duration: 1.23 ms; from 120 s on in minutes."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0 s"
    if value >= 120:
        whole = round(value)
        hours, minutes = whole // 3600, whole % 3600 // 60
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
    return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def gain(before: float | None, after: float | None) -> float | None:
    """The speed-up from the duration `before` to `after`. Both are rounded as `seconds` shows them, so that the quotient of the numbers
    on a page is the gain shown beside them. None if either is unknown."""
    return float(f"{before:.3g}") / float(f"{after:.3g}") if before and after else None


def flops_rate(value: float | None) -> str:
    """Floating-point operations per second: 258 GFLOP/s."""
    return NOTHING if not value else _scaled(value, ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")))


def giga(value: float | None) -> str:
    """A rate in 10⁹ per second without its unit, for a column whose header names that: 258."""
    return NOTHING if not value else digits(value / 1e9)


def bytes_rate(value: float | None) -> str:
    """Bytes per second in decimal units, as usual for bandwidth."""
    return NOTHING if not value else _scaled(value, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")))


def size(value: float | None) -> str:
    """Bytes of memory in binary units, as usual for caches."""
    if not value:
        return NOTHING
    unit, name = next((u, n) for u, n in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")) if value >= u or u == 1)
    return f"{value / unit:.3g} {name}" if value / unit < 999.5 else f"{value / unit:.0f} {name}"


def amount(value: float | None, unit: str = "") -> str:
    """A number of operations or bytes, with a prefix of 1000: 3.60 G, 33.6 MFLOP, 0 B."""
    if value is None:
        return NOTHING
    if value < 999.5:
        return f"{value:.0f} {unit}".rstrip()
    return _scaled(value, [(s, f"{prefix}{unit}") for s, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))])


def times(value: float | None) -> str:
    """A speed-up: 1.31×."""
    return NOTHING if value is None else f"{value:.2f}×" if 0.1 <= value < 9.995 else f"{digits(value, 2 if value < 0.1 else 3)}×"


def percent(value: float | None) -> str:
    """A fraction in percent: 85 %, 9.5 %."""
    if value is None:
        return NOTHING
    return f"{100 * value:.0f} %" if value >= 0.0995 or value == 0 else f"{digits(100 * value, 2)} %"


def spread(value: float | None) -> str:
    """Half the width of a confidence interval, given as a fraction of the value: ±0.4 %, ±12 %."""
    return NOTHING if value is None else f"±{100 * value:.1f} %" if value < 0.0995 else f"±{100 * value:.0f} %"
