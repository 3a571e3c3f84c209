"""Fits the polynomials of svod/compile/lower/math.py, and ERFCX of svod/tensor/operations/functions.py: weighted minimax by the Remez
exchange, in 60-digit decimal arithmetic.

    python experiments/polynomials.py            # every table, as Python source, with its error in bits
    python experiments/polynomials.py EXP        # those whose name contains EXP

A fit is `target(x) ≈ sum of c[j] * x**powers[j]` on an interval, and its error is measured times `weight(x)`, so that the result's
relative (or absolute) error is what is levelled. The first coefficients are rounded to the working type one after the other, the rest
being fitted again around them, because they carry the result's last bits. The rational function (TANH of float32) is fitted by
reweighted linear least squares in float64, which is ample for 24 bits.

No library of special functions is needed: exp and ln are `decimal`'s own, the rest are Taylor series.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal as D
from decimal import getcontext
from functools import lru_cache

import numpy as np

getcontext().prec = 60
Real = Callable[[D], D]


# -- reference functions ----------------------------------------------------------------------------
def series(x: D, term: D, ratio: Callable[[int], D]) -> D:
    """term + term*ratio(1) + term*ratio(1)*ratio(2) + …"""
    total, k = term, 0
    while True:
        k += 1
        term *= ratio(k)
        if abs(term) <= abs(total) * D(10) ** -62 or term == 0:
            return total
        total += term


def sin(x: D) -> D:
    return series(x, x, lambda k: -x * x / ((2 * k) * (2 * k + 1)))


def cos(x: D) -> D:
    return series(x, D(1), lambda k: -x * x / ((2 * k) * (2 * k - 1)))


def arctan_inverse(n: int) -> D:
    total, power, k = D(0), D(1) / n, 0
    while power > D(10) ** -65:
        total += (-1) ** k * power / (2 * k + 1)
        power /= n * n
        k += 1
    return total


PI = 4 * (4 * arctan_inverse(5) - arctan_inverse(239))       # Machin's formula
LN2 = D(2).ln()


def erf(x: D) -> D:
    """2/sqrt(pi) * exp(-x²) * sum of 2^n x^(2n+1) / (2n+1)!!: terms of one sign, so no digits are lost."""
    return 2 / PI.sqrt() * (-x * x).exp() * series(x, x, lambda k: 2 * x * x / (2 * k + 1))


def erfcx(x: D) -> D:
    """exp(x²) (1 - erf(x)) for x ≥ 0: from 3 on by its continued fraction, 1 / (sqrt(pi) (x + 1/2 / (x + 2/2 / (x + 3/2 / (x + …)))))."""
    if x < 3:
        return (x * x).exp() * (1 - erf(x))
    tail = x
    for k in range(700, 0, -1):
        tail = x + D(k) / 2 / tail
    return 1 / (PI.sqrt() * tail)


def tanh(x: D) -> D:
    e = (2 * x).exp()
    return (e - 1) / (e + 1)


def log1p(x: D) -> D:
    return (1 + x).ln()


# -- polynomials ------------------------------------------------------------------------------------
def solve(a: list[list[D]], b: list[D]) -> list[D]:
    """Gaussian elimination with partial pivoting."""
    n = len(b)
    rows = [[*row, rhs] for row, rhs in zip(a, b, strict=True)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            if factor:
                rows[r] = [v - factor * p for v, p in zip(rows[r], rows[i], strict=True)]
    x = [D(0)] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum((rows[i][j] * x[j] for j in range(i + 1, n)), D(0))) / rows[i][i]
    return x


def remez(grid: Sequence[D], target: Sequence[D], weight: Sequence[D], powers: Sequence[int]) -> tuple[list[D], D]:
    """The coefficients of the levelled fit on a grid, and its largest weighted error."""
    n, size = len(powers), len(grid)
    at = [round((size - 1) * (1 - np.cos(np.pi * i / n)) / 2) for i in range(n + 1)]
    table = [[x ** p if p else D(1) for p in powers] for x in grid]
    coefficients, worst = [D(0)] * n, D(0)
    for _ in range(30):
        rows = [[*table[i], (D(1) if k % 2 else D(-1)) / weight[i]] for k, i in enumerate(at)]
        *coefficients, level = solve(rows, [target[i] for i in at])
        errors = [(t - sum((c * v for c, v in zip(coefficients, row, strict=True)), D(0))) * w
                  for t, row, w in zip(target, table, weight, strict=True)]
        # the largest error of every run of one sign; of those, n + 1 neighbours that keep the largest
        peaks: list[int] = []
        for i in range(size):
            if peaks and (errors[i] > 0) == (errors[peaks[-1]] > 0):
                if abs(errors[i]) > abs(errors[peaks[-1]]):
                    peaks[-1] = i
            else:
                peaks.append(i)
        while len(peaks) > n + 1:
            peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
        worst = max(abs(e) for e in errors)
        if len(peaks) < n + 1 or worst <= abs(level) * D("1.001"):
            break
        at = peaks
    return coefficients, worst


@dataclass
class Fit:
    """A polynomial to fit: `powers` of x, low to high; `bits` of the working type; `exact` coefficients rounded one by one."""

    name: str
    low: D
    high: D
    target: Real
    weight: Real
    powers: Sequence[int]
    bits: int
    exact: int = 3

    def run(self) -> tuple[list[float], float]:
        points = 60 * len(self.powers)
        # Chebyshev points, none of them 0, where most targets are of the form 0/0
        cosines = [D(repr(float(np.cos(np.pi * (i + 0.5) / points)))) for i in range(points)]
        grid = [(self.low + self.high) / 2 - (self.high - self.low) / 2 * c for c in cosines]
        target, weight = [self.target(x) for x in grid], [abs(self.weight(x)) for x in grid]
        powers, done = list(self.powers), []
        rest, worst = remez(grid, target, weight, powers)
        for _ in range(min(self.exact, len(powers) - 1)):
            done.append(rounded(rest[0], self.bits))
            power = powers.pop(0)
            target = [t - D(done[-1]) * x ** power for t, x in zip(target, grid, strict=True)]
            rest, worst = remez(grid, target, weight, powers)
        return [*done, *(rounded(c, self.bits) for c in rest)], float(worst)


def rounded(x: D, bits: int) -> float:
    return float(np.float32(str(x))) if bits == 24 else float(x)


def erfcx_fit(bits: int, k: D, top: D, count: int) -> Fit:
    """(1 + 2x) erfcx(x) as a polynomial of q = (x - k) / (x + k) for x up to `top`."""
    def target(q: D) -> D:
        x = k * (1 + q) / (1 - q)
        return (1 + 2 * x) * erfcx(x)
    return Fit(f"ERFCX_{32 if bits == 24 else 64}", D(-1), (top - k) / (top + k), target, lambda q: 1 / target(q), range(count), bits, 1)


def erf_fits(bits: int, near: int, far: int, top: D) -> list[Fit]:
    """erf(x) = x + x q(x²) below 55/64, and 1 - q(x - 1)² from there to `top`."""
    name, middle = 32 if bits == 24 else 64, D(55) / 64
    root = lru_cache(None)(lambda u: (1 - erf(1 + u)).sqrt())
    return [Fit(f"ERF_{name}", D("1e-9"), middle ** 2, lambda z: erf(z.sqrt()) / z.sqrt() - 1, lambda z: z.sqrt() / erf(z.sqrt()),
                range(near), bits),
            Fit(f"ROOT_ERFC_{name}", middle - 1, top - 1, root, lambda u: 2 * root(u) / (1 - root(u) ** 2), range(far), bits, 0)]


def polynomial_fits() -> list[Fit]:
    root = D(2).sqrt()
    inverse_ln2 = 1 / LN2
    fits: list[Fit] = []
    for bits, name, n_exp, n_exp2, n_near, n_near2, n_sin, n_cos in ((24, "32", 6, 7, 5, 6, 3, 3), (53, "64", 12, 13, 10, 11, 7, 7)):
        z = (PI / 4 * D("1.0001")) ** 2
        fits += [
            # exp(r) = 1 + r + r² q(r)
            Fit(f"EXP_{name}", -LN2 * D("1.0001"), LN2 * D("1.0001"), lambda r: (r.exp() - 1 - r) / (r * r), lambda r: r * r / r.exp(),
                range(n_exp), bits),
            # 2^r = 1 + r q(r)
            Fit(f"EXP2_{name}", D("-1.0001"), D("1.0001"), lambda r: ((r * LN2).exp() - 1) / r, lambda r: r / (r * LN2).exp(),
                range(n_exp2), bits),
            # the same for half as large r
            Fit(f"EXP_NEAR_{name}", -LN2 / 2 * D("1.0001"), LN2 / 2 * D("1.0001"), lambda r: (r.exp() - 1 - r) / (r * r),
                lambda r: r * r / r.exp(), range(n_near), bits),
            Fit(f"EXP2_NEAR_{name}", D("-0.50005"), D("0.50005"), lambda r: ((r * LN2).exp() - 1) / r, lambda r: r / (r * LN2).exp(),
                range(n_near2), bits),
            # sin(r) = r (1 + z q(z)), cos(r) = 1 - z/2 + z² q(z), z = r²
            Fit(f"SIN_{name}", z * D("1e-9"), z, lambda z: (sin(z.sqrt()) / z.sqrt() - 1) / z, lambda z: z * z.sqrt() / sin(z.sqrt()),
                range(n_sin), bits),
            Fit(f"COS_{name}", z * D("1e-9"), z, lambda z: (cos(z.sqrt()) - 1 + z / 2) / (z * z), lambda z: z * z / cos(z.sqrt()),
                range(n_cos), bits),
        ]
    fits += [
        # log(1 + f) = f - f²/2 + f³ q(f)
        Fit("LOG_32", 1 / root - 1, root - 1, lambda f: (log1p(f) - f + f * f / 2) / f ** 3, lambda f: f ** 3 / log1p(f),
            range(9), 24),
        # log2(1 + f) = f/ln 2 + f² q(f)
        Fit("LOG2_32", 1 / root - 1, root - 1, lambda f: (log1p(f) / f - 1) * inverse_ln2 / f,
            lambda f: f * f / (log1p(f) * inverse_ln2), range(9), 24),
        # atanh(s) = s + s z q(z), z = s²: log(1 + f) = 2 atanh(s), s = f / (2 + f)
        Fit("ATANH_64", D("1e-12"), D("0.02944"), lambda z: (((1 + z.sqrt()) / (1 - z.sqrt())).ln() / 2 / z.sqrt() - 1) / z, lambda z: z,
            range(7), 53),
        # tanh(x) = x + x z q(z) up to 0.625, z = x²
        Fit("TANH_64", D("1e-9"), D("0.625") ** 2, lambda z: (tanh(z.sqrt()) / z.sqrt() - 1) / z, lambda z: z * z.sqrt() / tanh(z.sqrt()),
            range(12), 53),
        *[fit for numbers in ((24, 6, 12, D("3.9375")), (53, 12, 28, D(6))) for fit in erf_fits(*numbers)],
        *[erfcx_fit(*numbers) for numbers in ((24, D(2), D("10.3"), 10), (53, D(4), D("27.5"), 22))],
        # for POW of float32 inside float64: log2(1 + f) = f q(f) and 2^r = 1 + r q(r) to about 36 and 31 bits
        Fit("POW_LOG2_32", 1 / root - 1, root - 1, lambda f: log1p(f) * inverse_ln2 / f, lambda f: f / (log1p(f) * inverse_ln2),
            range(14), 53),
        Fit("POW_EXP2_32", D("-1.0001"), D("1.0001"), lambda r: ((r * LN2).exp() - 1) / r, lambda r: r / (r * LN2).exp(), range(9), 53),
        # for POW of float64: atanh(s) = s (1 + z (1/3 + z q(z))), z = s²
        Fit("POW_ATANH_64", D("1e-12"), D("0.02944"),
            lambda z: (((1 + z.sqrt()) / (1 - z.sqrt())).ln() / 2 / z.sqrt() - 1 - z / 3) / (z * z), lambda z: z * z, range(7), 53),
    ]
    return fits


# -- rational functions -----------------------------------------------------------------------------
def rational(function: Real, lead: float, limit: float, n: int, m: int) -> tuple[list[float], list[float], float]:
    """function(x) ≈ x P(z)/Q(z), z = x², on [0, limit], degrees n and m, with Q(0) = 1 and P(0) = `lead`: (P, Q, relative error).

    Linearised least squares: |P - g Q| / (g Q of the round before), reweighted towards the largest errors (Lawson)."""
    count = 1200
    x = limit * (1 - np.cos(np.pi * (np.arange(count) + 0.5) / count)) / 2 + 1e-6
    g = np.array([float(function(D(repr(float(v)))) / D(repr(float(v)))) for v in x])
    z = (x / limit) ** 2
    lawson, q_old, best = np.ones(count), np.ones(count), (np.inf, [0.0], [0.0])
    for _ in range(400):
        w = np.sqrt(lawson) / (g * q_old)
        columns = [z ** k for k in range(1, n + 1)] + [-g * z ** k for k in range(1, m + 1)]
        answer = np.linalg.lstsq(np.stack(columns, 1) * w[:, None], (g - lead) * w, rcond=None)[0]
        p = lead + sum(c * z ** (k + 1) for k, c in enumerate(answer[:n]))
        q = 1 + sum(c * z ** (k + 1) for k, c in enumerate(answer[n:]))
        error = np.abs(p / q / g - 1)
        if error.max() < best[0]:
            scale = limit ** -2.0
            best = (float(error.max()), [lead, *(c * scale ** (k + 1) for k, c in enumerate(answer[:n]))],
                    [1.0, *(c * scale ** (k + 1) for k, c in enumerate(answer[n:]))])
        lawson = lawson * (error / error.max() + 1e-3) ** 0.5
        lawson, q_old = lawson / lawson.mean(), q
    return [float(np.float32(c)) for c in best[1]], [float(np.float32(c)) for c in best[2]], best[0]


def show(name: str, coefficients: Sequence[float], error: float, bits: int) -> None:
    """Print an entry of svod/compile/lower/polynomials.json."""
    short = ", ".join([str(np.float32(c)) if bits == 24 else repr(c) for c in coefficients])
    print(f'  "{name}": {{"error": "2^{np.log2(error):.1f}", "bits": {bits}, "coefficients": [{short}]}},')


def parts(x: D, count: int, bits: int) -> list[float]:
    """x as a sum of numbers of the working type, each rounded toward zero, so that all have its sign."""
    found: list[float] = []
    for _ in range(count):
        part = rounded(x, bits)
        if abs(D(part)) > abs(x):
            part = float(np.nextafter(np.float32(part), np.float32(0))) if bits == 24 else float(np.nextafter(part, 0.0))
        found.append(part)
        x -= D(part)
    return found


def main(wanted: str) -> None:
    if "PI_2" in wanted or not wanted:
        print(f"_PI_2 = {tuple(parts(PI / 2, 3, 53))}")
    for fit in polynomial_fits():
        if wanted in fit.name:
            coefficients, error = fit.run()
            show(fit.name, coefficients, error, fit.bits)
    if wanted in "TANH_32":
        p, q, error = rational(tanh, 1.0, 9.03125, 6, 3)
        show("TANH_32_P", p, error, 24)
        show("TANH_32_Q", q, error, 24)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
