"""A CUDA kernel written by hand with pycuda, and svod, on the same memory of a GPU: docs/pycuda.md as a program.

    pip install -e '.[pycuda]' && python experiments/beside_pycuda.py

It needs a GPU of NVIDIA's and nvcc, which pycuda compiles the kernel with."""
from __future__ import annotations

import numpy as np
import pycuda.autoinit
import pycuda.driver as cuda
import pycuda.gpuarray as gpuarray
from pycuda.compiler import SourceModule

import svod
from svod import Tensor

SCALE = """
__global__ void scale(float *x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}"""
THREADS = 256       # per block


def main() -> None:
    scale = SourceModule(SCALE).get_function("scale")
    x, w = np.random.rand(61, 128).astype("f4"), np.random.rand(128, 257).astype("f4")
    weights = Tensor(w).to("CUDA")

    @svod.jit
    def head(a: Tensor) -> Tensor:
        return (a @ weights).relu()

    theirs = gpuarray.to_gpu(x)
    for turn in range(3):
        ours = head(theirs)
        blocks = -(-ours.numel() // THREADS)
        scale(ours, np.float32(0.5), np.int32(ours.numel()), block=(THREADS, 1, 1), grid=(blocks, 1))
        found, wanted = (ours + 1).numpy(), 0.5 * np.maximum((x + turn) @ w, 0) + 1
        print(f"turn {turn}: largest difference to NumPy {np.abs(found - wanted).max() / wanted.max():.1e} of the largest value")
        theirs += np.float32(1)
    assert cuda.Context.get_current() == pycuda.autoinit.context, "the program's context is current"


if __name__ == "__main__":
    main()
