"""The opts that rewrite a kernel into one with other stages or axes: ROUND, ONLINE, FLATTEN and WINOGRAD. They come before all others."""
from __future__ import annotations

from typing import Any

from svod.core.kernel.algorithms.online import is_pair
from svod.core.kernel.algorithms.online import online as rewrite_online
from svod.core.kernel.algorithms.rounding import ROUNDED_TO, rounded
from svod.core.kernel.algorithms.winograd import winograd as rewrite_winograd
from svod.core.kernel.opts.splits import split_row
from svod.core.kernel.scheduler import UPCAST, Opt, Scheduler
from svod.core.machine.target import FAST
from svod.core.schedule.flatten import flatten as flat_ast
from svod.errors import KernelOptError


def online(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Compute a maximum over rows, the sum of exponentials relative to it and their weighted sums in one pass over blocks of n
    positions: ONLINE(stage of the maximum, n). Each block has its own maximum; where two blocks meet, the sums of the smaller maximum
    are scaled down (`svod/core/kernel/algorithms/online.py`). ONLINE comes first; later opts see the stages of the blocks.

        for k: m = max(m, x[k]);            for b in K/n: { p = max of x[b*n…]; w[i] = exp(x[b*n + i] - p), i < n;
        for k: s += exp(x[k] - m);              (m, s, a) = expsum((m, s, a), (p, Σ w[i], Σ w[i]*v[b*n + i])) };
        for k: a += exp(x[k] - m)/s*v[k]    a = a/s
    """
    if not isinstance(arg, int) or isinstance(arg, bool):
        raise KernelOptError(f"ONLINE({axis}, {arg!r}): needs the positions of a block, an int")
    if any(o.op not in ("ONLINE", "ROUND") for o in state.applied_opts):
        raise KernelOptError(f"ONLINE({axis}, {arg}): it makes other stages of the kernel's, so it comes before all other opts")
    try:
        kernel = rewrite_online(state.kernel, axis, arg)
    except KernelOptError as e:
        raise KernelOptError(f"ONLINE({axis}, {arg}): {e}") from None
    new = Scheduler(kernel, state.target)
    for row, r in enumerate(new.rows):
        # both elements of a (maximum, sum) pair are computed in one pass
        if is_pair(kernel, r.axis):
            new = split_row(new, row, r.extent, UPCAST)
    return new.copy(rewrites=(*state.rewrites, Opt("ONLINE", axis, arg)), applied_opts=state.applied_opts)


def flatten(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Turn a sum of products of two stages into a product of two matrices: FLATTEN(stage). All output axes that only the first factor has
    become one axis, those that only the second has another, and all reduce axes a third, whose last part is the axis along which the
    factors' loads are contiguous (`svod/core/schedule/flatten.py`). FLATTEN comes first, or after WINOGRAD; later opts see the merged
    axes.

        for n, o, y, x: for c, i, j:                        for m in N*Y*X, o: for k in I*J*C:
            out[n, o, y, x] += a[n, y + i, x + j, c]*w[…]       out[m, o] += a[m // YX, m // X % Y + k // JC, …]*w[o, k]
    """
    if arg is not None:
        raise KernelOptError(f"FLATTEN({axis}, {arg!r}): takes a stage alone")
    if any(o.op not in ("ROUND", "WINOGRAD") for o in state.applied_opts):
        raise KernelOptError(f"FLATTEN({axis}): it makes other axes of the kernel's, so it comes before all other opts")
    stage = state.kernel.stages[state.stage_id(axis)]
    try:
        kernel = state.kernel.rewritten("FLATTEN", axis, None, lambda: flat_ast(state.kernel.ast, stage.node))
    except KernelOptError as e:
        raise KernelOptError(f"FLATTEN({axis}): {e}") from None
    return Scheduler(kernel, state.target).copy(rewrites=(*state.rewrites, Opt("FLATTEN", axis)), applied_opts=state.applied_opts)


def winograd(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Compute a convolution of stride 1 with fewer multiplications, in tiles of m outputs along each window: WINOGRAD(output stage, m)
    (`svod/core/kernel/algorithms/winograd.py`). WINOGRAD comes first; later opts see the stages of the transforms and of the products. On
    targets with groups the products read copies of U and V, stages that STAGE may keep in shared memory while U and V are phases.

        for o, y, x: for c, i, j:                       U[a, o, c] = G w;    V[a, c, t] = B x     (a: the (m + r - 1)² points)
            out[o, y, x] += x[c, y + i, x + j]*w[…]     M[a, o, t] = Σ c of U[a, o, c]*V[a, c, t];    out = A M
    """
    if not isinstance(arg, int) or isinstance(arg, bool):
        raise KernelOptError(f"WINOGRAD({axis}, {arg!r}): needs the outputs of a tile along each window, an int")
    if state.applied_opts:
        raise KernelOptError(f"WINOGRAD({axis}, {arg}): it makes other stages of the kernel's, so it comes before all other opts")
    try:
        kernel = rewrite_winograd(state.kernel, axis, arg, copies=state.target.has_groups)
    except KernelOptError as e:
        raise KernelOptError(f"WINOGRAD({axis}, {arg}): {e}") from None
    return Scheduler(kernel, state.target).copy(rewrites=(Opt("WINOGRAD", axis, arg),), applied_opts=state.applied_opts)


def round_factors(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Round both factors of a sum of products of float32: ROUND(stage, bfloat16); the sum stays float32, and TC computes it
    (`svod/core/kernel/algorithms/rounding.py`). The policy "fast" alone allows it. ROUND comes first; later opts see the stages of the
    rounded factors.

        for m, n: for k:                                X[m, k] = f32(bf16(x[m, k]));    W[k, n] = f32(bf16(w[k, n]))
            out[m, n] += x[m, k]*w[k, n]                for m, n: for k: out[m, n] += X[m, k]*W[k, n]
    """
    if arg not in ROUNDED_TO:
        raise KernelOptError(f"ROUND({axis}, {arg!r}): needs the type to round to: {', '.join(ROUNDED_TO)}")
    if state.target.numerics != FAST:
        raise KernelOptError(f"ROUND({axis}, {arg}): `numerics={state.target.numerics}` keeps products of float32 as exact as they are; "
                             f"`numerics={FAST}` may round their factors")
    if any(o.op != "ROUND" for o in state.applied_opts):
        raise KernelOptError(f"ROUND({axis}, {arg}): it makes other stages of the kernel's, so it comes before all other opts, and is "
                             "combined with no other algorithm")
    try:
        kernel = rounded(state.kernel, axis, arg)
    except KernelOptError as e:
        raise KernelOptError(f"ROUND({axis}, {arg}): {e}") from None
    return Scheduler(kernel, state.target).copy(rewrites=(*state.rewrites, Opt("ROUND", axis, arg)), applied_opts=state.applied_opts)
