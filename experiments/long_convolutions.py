"""Convolutions with long windows against NumPy, SciPy and PyTorch. Milliseconds, medians of interleaved runs.

    python experiments/long_convolutions.py [--seconds 4] [NAME …]

Weights are constants: peers that multiply transforms have those of the weights before they are timed. What is not installed is left out.
All run with as many threads as svod; pauses between the runs let the threads of others stop spinning.
"""
from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
from beside_libraries import Array, Run, beside, best_of, chosen, library, race

# isort: split
from svod import PrepareConfig, Tensor
from svod.compile.cpu.host import host_target

# shape of the image, shape of the weight, groups, padding
CASES = {
    "16k samples, 4096 taps": ((1, 1, 1 << 14), (1, 1, 4096), 1, 0),
    "64k samples, 4096 taps": ((1, 1, 1 << 16), (1, 1, 4096), 1, 0),
    "256k samples, 4096 taps": ((1, 1, 1 << 18), (1, 1, 4096), 1, 0),
    "1M samples, 4096 taps": ((1, 1, 1 << 20), (1, 1, 4096), 1, 0),
    "8 channels of 64k, 4096 taps each": ((1, 8, 1 << 16), (8, 1, 4096), 8, 0),
    "64 channels of 16k, 4096 taps each": ((1, 64, 1 << 14), (64, 1, 4096), 64, 2048),
    "64 to 64 channels of 56×56, 15×15": ((1, 64, 56, 56), (64, 64, 15, 15), 1, 7),
    "the same, 8 images": ((8, 64, 56, 56), (64, 64, 15, 15), 1, 7),
    "64 to 64 channels of 56×56, 7×7": ((1, 64, 56, 56), (64, 64, 7, 7), 1, 3),
    "64 channels of 56×56, 15×15 each": ((1, 64, 56, 56), (64, 1, 15, 15), 64, 7),
    "64 channels of 56×56, 31×31 each": ((1, 64, 56, 56), (64, 1, 31, 31), 64, 15),
}
BLOCKS = (1 << 14, 1 << 15, 1 << 16)        # positions of a block of the peers that cut rows into blocks


def svod_runs(x: Array, w: Array, groups: int, pad: int) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for name, config in (("svod", PrepareConfig()), ("svod, direct", PrepareConfig(transformed_mb=0))):
        image, weight = Tensor(x).realize(), Tensor(w).realize()
        made = getattr(image, f"conv{x.ndim - 2}d")(weight, padding=pad, groups=groups)
        runs[name] = made.prepare(config, constants=[weight]).execute
    return runs


def torch_runs(x: Array, w: Array, groups: int, pad: int) -> dict[str, Run]:
    torch = library("torch")
    if torch is None:
        return {}
    rank, functional = x.ndim - 2, torch.nn.functional
    image, weight, dims = torch.from_numpy(x), torch.from_numpy(w), tuple(range(2, x.ndim))
    sizes = [n + 2 * pad for n in x.shape[2:]]
    kept = tuple(slice(0, n - k + 1) for n, k in zip(sizes, w.shape[2:], strict=True))
    spectrum = torch.fft.rfftn(weight, s=sizes, dim=dims).conj().resolve_conj()
    matrices = spectrum.permute(*dims, 1, 0).contiguous()

    def direct() -> Any:
        return getattr(functional, f"conv{rank}d")(image, weight, padding=pad, groups=groups)

    def whole() -> Any:
        found = torch.fft.rfftn(functional.pad(image, [pad] * (2 * rank)), s=sizes, dim=dims)
        if w.shape[1] > 1:
            found = torch.matmul(found.permute(*dims, 0, 1), matrices).permute(rank, rank + 1, *range(rank))
        else:
            found = found * spectrum[:, 0]
        return torch.fft.irfftn(found, s=sizes, dim=dims)[(slice(None), slice(None), *kept)]

    def blocks(n: int) -> Run:
        step = n - w.shape[2] + 1
        count, own = -(-(sizes[0] - w.shape[2] + 1) // step), torch.fft.rfft(weight[:, 0], n=n).conj().resolve_conj()[:, None]

        def run() -> Any:
            rows = functional.pad(image, [pad, max(0, (count - 1) * step + n - x.shape[2] - pad)]).unfold(2, n, step)[:, :, :count]
            return torch.fft.irfft(torch.fft.rfft(rows) * own, n=n)[..., :step].reshape(*x.shape[:2], -1)[..., kept[0]]
        return run
    runs = {"torch conv": direct, "torch.fft": whole}
    if rank == 1 and w.shape[1] == 1:
        runs.update({f"torch.fft, blocks of {n}": blocks(n) for n in BLOCKS if n < 4 * sizes[0]})
    return runs


def scipy_runs(x: Array, w: Array, groups: int, pad: int) -> dict[str, Run]:
    if library("scipy") is None:
        return {}
    import scipy.fft
    import scipy.signal

    threads, rank, dims = host_target().threads, x.ndim - 2, tuple(range(2, x.ndim))
    own = [scipy.fft.next_fast_len(n + 2 * pad, real=True) for n in x.shape[2:]]
    kept = tuple(slice(0, n + 2 * pad - k + 1) for n, k in zip(x.shape[2:], w.shape[2:], strict=True))
    around = [(0, 0), (0, 0), *[(pad, pad)] * rank]
    spectrum = scipy.fft.rfftn(w, s=own, axes=dims, workers=threads).conj()
    matrices = np.ascontiguousarray(spectrum.transpose(*dims, 1, 0))

    def products() -> Any:
        found = scipy.fft.rfftn(np.pad(x, around), s=own, axes=dims, workers=threads)
        if w.shape[1] > 1:
            found = np.matmul(found.transpose(*dims, 0, 1), matrices).transpose(rank, rank + 1, *range(rank))
        else:
            found = found * spectrum[:, 0]
        return scipy.fft.irfftn(found, s=own, axes=dims, workers=threads)[(slice(None), slice(None), *kept)]
    runs: dict[str, Run] = {"scipy.fft": products}
    if w.shape[1] == 1 and x.shape[0] == 1:
        taps = np.flip(w[:, 0], tuple(range(1, rank + 1)))[None]
        runs["fftconvolve"] = lambda: scipy.signal.fftconvolve(np.pad(x, around), taps, "valid", axes=dims)
        runs["oaconvolve"] = lambda: scipy.signal.oaconvolve(np.pad(x, around), taps, "valid", axes=dims)
        if rank == 1:
            runs["numpy.convolve"] = lambda: [np.convolve(row, t, "valid") for row, t in zip(np.pad(x, around)[0], taps[0], strict=True)]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for case in chosen(CASES, options.names):
        shape, taps, groups, pad = CASES[case]
        x, w = (rng.standard_normal(s).astype(np.float32) for s in (shape, taps))
        times = race({**svod_runs(x, w, groups, pad), **torch_runs(x, w, groups, pad), **scipy_runs(x, w, groups, pad)}, options.seconds)
        ms = {name: 1e3 * statistics.median(found) for name, found in times.items()}
        best = best_of(times, [name for name in times if not name.startswith("svod")])
        print(f"{case:36s} direct {ms['svod, direct']:9.3f}   svod {ms['svod']:8.3f}", end="   ")
        print(f"{best} {ms[best]:.3f}, {beside(times, best).median:.2f}×" if best else "", flush=True)


if __name__ == "__main__":
    main()
