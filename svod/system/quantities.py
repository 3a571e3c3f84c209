"""Quantities as people read them: three significant digits, a unit that keeps them short, a no-break space between."""
from __future__ import annotations

import math
from collections.abc import Sequence

NBSP = "\u00a0"
NOTHING = "–"


def digits(value: float, significant: int = 3) -> str:
    """`value` with so many significant digits and never an exponent: 1.23, 12.3, 123, 1 230."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if rounded and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        places -= 1     # 9.996 became 10.00
    return f"{rounded:,.{max(0, places)}f}".replace(",", NBSP)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit that leaves at least 1, after rounding."""
    for size, unit in units[:-1]:
        if round(abs(value) / size, 2 - math.floor(math.log10(abs(value) / size))) >= 1:
            return f"{digits(value / size)}{NBSP}{unit}"
    size, unit = units[-1]
    return f"{digits(value / size)}{NBSP}{unit}"


def seconds(value: float | None) -> str:
    """A duration: 1.23 ms; minutes from 120 s on."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return f"0{NBSP}s"
    if value >= 120:
        whole = round(value)
        hours, minutes = whole // 3600, whole % 3600 // 60
        return f"{hours}{NBSP}h {minutes}{NBSP}min" if hours else f"{minutes}{NBSP}min {whole % 60}{NBSP}s"
    return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def flops_rate(value: float | None) -> str:
    """Floating-point operations per second."""
    return NOTHING if not value else _scaled(value, ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")))


def bytes_rate(value: float | None) -> str:
    """Bytes per second; decimal units, as bandwidth is given everywhere."""
    return NOTHING if not value else _scaled(value, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")))


def size(value: float | None) -> str:
    """Bytes of memory; binary units, as caches are given everywhere."""
    if not value:
        return NOTHING
    unit, name = next((u, n) for u, n in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")) if value >= u or u == 1)
    return f"{value / unit:.3g}{NBSP}{name}" if value / unit < 999.5 else f"{value / unit:.0f}{NBSP}{name}"


def amount(value: float | None) -> str:
    """A number of operations or bytes: 3.60 G."""
    if value is None:
        return NOTHING
    return "0" if value == 0 else _scaled(value, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))).rstrip(NBSP)


def times(value: float | None) -> str:
    """A speed-up: 1.31×."""
    return NOTHING if value is None else f"{value:.2f}×" if 0.1 <= value < 9.995 else f"{digits(value, 2 if value < 0.1 else 3)}×"


def percent(value: float | None) -> str:
    """A share: 85 %."""
    if value is None:
        return NOTHING
    return f"{100 * value:.0f}{NBSP}%" if value >= 0.0995 or value == 0 else f"{digits(100 * value, 2)}{NBSP}%"
