"""WebGPU: skipped where there is no package, no driver or no adapter."""
