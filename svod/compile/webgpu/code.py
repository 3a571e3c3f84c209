"""Loaded programs: a pipeline for each phase and each of its forms, made once per opened device of an adapter."""
from __future__ import annotations

from typing import Any

from svod.compile.lower.program import ProgramSpec
from svod.compile.webgpu.adapter import package
from svod.compile.webgpu.device import WebGpuDevice, error_text, trusted_module
from svod.compile.webgpu.render import ENTRY, OTHER, WgslPhase, read_modules
from svod.errors import CompileError, UnsupportedError


class WgslPipeline:
    """A phase on a device. `bindings`: the contents of the bindings after the first. `other`: the buffer of the word OTHER, if there is
    one."""

    other: Any = None

    def __init__(self, made: WebGpuDevice, module: WgslPhase, symbol: str) -> None:
        if len(module.bindings) > made.most_bindings:
            raise UnsupportedError(f"phase {symbol} uses {len(module.bindings)} buffers; this device binds {made.most_bindings} at a time: "
                                   "realize() some of what is put together before")
        self.bindings = module.bindings
        with made.trying(f"the code of {symbol} was loaded"):
            try:
                shader = trusted_module(made, module.wgsl)
                self.layout = made.bind_group_layout(len(module.bindings))
                self.wgpu = made.wgpu.create_compute_pipeline(layout=made.wgpu.create_pipeline_layout(bind_group_layouts=[self.layout]),
                                                              compute={"module": shader, "entry_point": ENTRY})
                if any(op == OTHER for op, _ in module.bindings):
                    self.other = made.wgpu.create_buffer(size=16, usage=package().BufferUsage.STORAGE | package().BufferUsage.COPY_SRC)
                self._warm(made)
            except Exception as error:      # wgpu raises exceptions of several classes
                if made.is_lost_by(error):
                    raise
                raise CompileError(f"WGSL of {symbol}: {error_text(error)}") from error

    def _warm(self, made: WebGpuDevice) -> None:
        """Launch one group that does nothing, because drivers compile code at its first launch. Raises CompileError if the driver runs it
        with a different subgroup size than the target's."""
        uniform, storage = made.nothing
        bound = [uniform, *[self.other if op == OTHER else storage for op, _ in self.bindings]]
        entries = [{"binding": n, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}} for n, buffer in enumerate(bound)]
        encoder = made.wgpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(self.wgpu)
        compute.set_bind_group(0, made.wgpu.create_bind_group(layout=self.layout, entries=entries))
        compute.dispatch_workgroups(1)
        compute.end()
        made.queue.submit([encoder.finish()])
        made.wait()
        if self.other is not None and any(made.queue.read_buffer(self.other)):
            raise CompileError("the driver runs it in subgroups of another size than the adapter's, or in some that are not full: use "
                               "another adapter, or the CPU (unset SVOD_DEVICE)")


class WebGpuCode:
    """A program as modules of WGSL and their pipelines on `made`. Raises CompileError for modules that wgpu rejects."""

    def __init__(self, source: str, spec: ProgramSpec, made: WebGpuDevice) -> None:
        self.spec, self.modules = spec, read_modules(source)
        if len(self.modules) != len(spec.phases):
            raise CompileError(f"the code has {len(self.modules)} phases, the program {spec.name} {len(spec.phases)}")
        self._pipelines: dict[tuple[int, int, bool], WgslPipeline] = {}    # (first address of the device, phase, aligned) → pipeline
        for number in range(len(self.modules)):
            self.pipeline(made, number, aligned=True)

    def pipeline(self, made: WebGpuDevice, phase: int, aligned: bool) -> WgslPipeline:
        """Return the pipeline of a phase, for arguments that are aligned for bindings, or for any arguments."""
        key = (made.first, phase, aligned)
        pipeline = self._pipelines.get(key)
        if pipeline is None:
            forms = self.modules[phase]
            pipeline = self._pipelines[key] = WgslPipeline(made, forms.aligned if aligned else forms.any, self.spec.phases[phase].symbol)
        return pipeline

    def close(self) -> None:
        """Free the pipelines."""
        self._pipelines.clear()
