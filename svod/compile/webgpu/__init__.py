"""The WebGPU backend: LINEAR → WGSL → pipelines, through wgpu."""
