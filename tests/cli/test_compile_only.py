"""svod-tune --compile-only: kernels are compiled for a device that is not there; the table and the report show registers and spills."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from svod.cli.tune.command import cli
from svod.cli.tune.compile_only import CompiledKernel, CompiledState, compiled_table
from svod.compile.cuda import ptxas
from svod.compile.cuda.code import Nvptx
from svod.compile.plan.unbound_plan import BufferSpec, Call, UnboundPlan
from svod.compile.resources import PhaseResources
from svod.core.ir.dtype import dtypes
from svod.errors import CompileError, SvodError
from svod.tune import capture
from svod.tune.db import layers
from tests.compile.lower.test_intrinsics import gemm
from tests.plans import canonical
from tests.toy_backend.target import TOY

BF16 = dtypes.bfloat16


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A capture of one product of bfloat16 from another machine. The test reads and writes none of the user's files."""
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setenv("SVOD_OBJECT_CACHE", str(tmp_path / "objects"))
    monkeypatch.setenv("SVOD_DEVICE", "CUDA:sm_80")
    for name in ("SVOD_TUNE_DB", "BEAM", "SVOD_CAPTURE"):
        monkeypatch.delenv(name, raising=False)
    kernel = canonical(gemm(256, 256, 256, BF16, BF16, out=BF16))
    kinds = ["output" if slot in kernel.outs else "input" for slot in range(len(kernel.params))]
    buffers = tuple(BufferSpec(p.dtype, p.arg.size, kind) for p, kind in zip(kernel.params, kinds, strict=True))
    plan = UnboundPlan((Call(kernel.key, (0, 1, 2), "gemm", "block.linear", "", 0, (0, 0, 0)),), buffers, kernel.outs, {kernel.key: kernel})
    path = tmp_path / "c.jsonl"
    capture.write_capture(path, capture.Capture([capture.CapturedPlan(capture.plan_digest(plan, "another"), "another", plan, {}, 3)]))
    return str(path)


def compile_only(path: str, report: Path) -> tuple[int, str, dict[str, object]]:
    done = CliRunner().invoke(cli, ["--from", path, "--compile-only", "--json", str(report)])
    return done.exit_code, done.output, json.loads(report.read_text())


@pytest.mark.slow
def test_every_state_is_compiled_and_reported(captured: str, tmp_path: Path) -> None:
    status, output, report = compile_only(captured, tmp_path / "r.json")
    assert status == 0 and "target nvptx64/sm_80" in output and "compiled" in output, output
    kernel, = report["kernels"]      # type: ignore[misc]
    states = kernel["states"]        # type: ignore[index]
    assert kernel["name"] == "gemm" and kernel["calls"] == 3 and kernel["origins"] == ["block.linear"]       # type: ignore[index]
    assert [s["source"] for s in states].count("heuristic") == 1 and len(states) > 10 and not any(s["error"] for s in states)
    assert [s["predicted_cycles"] for s in states] == sorted(s["predicted_cycles"] for s in states)
    assert "TC(r0, mma_bf16" in states[0]["chain"]
    if ptxas.ptxas_version() is None:
        assert all(p["registers"] is p["occupancy"] is None for s in states for p in s["resources"])
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    for state in states:
        for phase in state["resources"]:
            assert phase["symbol"].startswith("svod_p") and 0 < phase["registers"] <= 255
            assert phase["occupancy"] == phase["resident"] * phase["threads"] / 2048 <= 1      # threads of whole warps
            assert phase["spill_stores"] == phase["spill_loads"] == phase["stack"] == 0


@pytest.mark.slow
def test_a_state_that_is_refused_is_an_error_of_its_own(captured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Nvptx, source: str, arch: str, assembled: bool = True) -> tuple[str, bytes, tuple[ptxas.PtxasReport, ...]]:
        if "cp.async.wait.group(i32 1)" in source:      # a pipeline of three buffers
            raise CompileError("ptxas refuses it")
        return "ptx", b"", ()
    monkeypatch.setattr(Nvptx, "image_of", refuse)
    status, output, report = compile_only(captured, tmp_path / "r.json")
    kernel, = report["kernels"]      # type: ignore[misc]
    errors = [s["error"] for s in kernel["states"]]       # type: ignore[index]
    assert status == 1 and None in errors and "ptxas refuses it" in errors and "ptxas refuses it" in output


@pytest.mark.parametrize(("arguments", "said"), [
    (["--device", "CUDA:sm_90"], "compiles for CUDA:sm_90, which is no device"),
    (["--device", "CUDA:sm_12", "--compile-only"], "no device 'CUDA:sm_12'"),
    (["--device", "TPU"], "no device 'TPU'")])
def test_a_device_that_will_not_do_is_said_before_the_script_runs(captured: str, tmp_path: Path, arguments: list[str], said: str) -> None:
    script, ran = tmp_path / "model.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w')")
    done = CliRunner().invoke(cli, [*arguments, str(script)])
    assert isinstance(done.exception, SvodError) and said in str(done.exception) and not ran.exists(), done.output


def test_the_table_counts_what_spills() -> None:
    def state(cycles: float, registers: int, spilled: int, error: str | None = None) -> CompiledState:
        phases = (PhaseResources("svod_p0", 128, 64, registers, 0, spilled, 0, 2, 0.125),
                  PhaseResources("svod_p1", 128, 128, 10, 0, 0, 0, 16, 1.0))
        return CompiledState("sketch", "UPCAST(o0, 4)", cycles, () if error else phases, error)
    states = state(1.0, 255, 8), state(2.0, 90, 4), state(3.0, 32, 0), state(4.0, 0, 0, "no")
    header, _, row, *_, error = compiled_table([CompiledKernel("0123456789", "gemm", (), 2, states)], TOY, 200)
    assert header.split() == ["kernel", "calls", "states", "registers", "shared", "spilled", "occupancy", "states", "that", "spill",
                              "refused"]
    assert row.split() == ["gemm", "01234567", "2", "4", "255", "128", "8", "12", "%", "2", "1"]
    assert error == "gemm 01234567, UPCAST(o0, 4): no"


def test_the_table_says_where_nothing_makes_machine_code() -> None:
    state = CompiledState("heuristic", "", 1.0, (PhaseResources("svod_p0", 128, 64),))
    *_, last = compiled_table([CompiledKernel("0123456789", "gemm", (), 2, (state,))], TOY, 200)
    assert last == ("compiled 1 state of 1 kernel; nothing here makes machine code for this device (for CUDA ptxas does), so registers and "
                    "spills are not known")
