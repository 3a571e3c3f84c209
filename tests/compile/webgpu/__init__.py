"""Tests of WebGPU, which are skipped without the package wgpu, a driver or an adapter."""
