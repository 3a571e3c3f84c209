"""The description of the host as a target."""
from __future__ import annotations

import subprocess
import sys

import pytest

from svod.compile.cpu import host
from svod.compile.cpu.host import host_target, make_target
from svod.core.ir.dtype import dtypes
from svod.core.machine.isa import ISA, isa_features, llvm_features
from svod.errors import DeviceError
from svod.system.process.cores import usable_cores


def test_instruction_sets_count_as_a_whole() -> None:
    every = [f for needs in ISA["x86_64"].values() for f in needs]
    assert isa_features("x86_64", every) == tuple(sorted(ISA["x86_64"]))
    # a virtual machine that hides one part of AVX-512 has none of it
    assert "avx512f" not in isa_features("x86_64", set(every) - {"avx512vl"})
    assert isa_features("x86_64", []) == () and isa_features("aarch64", []) == ("neon",), "every processor of aarch64 has it"
    assert llvm_features("x86_64", ("avx512f", "fma")) == ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "fma")
    assert set(llvm_features("x86_64", tuple(ISA["x86_64"]))) == set(every)


@pytest.mark.parametrize("arch, features, size, registers, fma, masks, scaleb", [
    ("x86_64", ("avx2", "avx512f", "fma"), 64, 32, True, True, True), ("x86_64", ("avx2", "fma"), 32, 16, True, True, False),
    ("x86_64", ("sse4",), 16, 16, False, False, False), ("aarch64", ("neon",), 16, 32, True, False, False)])
def test_registers_follow_from_the_instruction_sets(arch: str, features: tuple[str, ...], size: int, registers: int, fma: bool,
                                                    masks: bool, scaleb: bool) -> None:
    target = make_target(arch, "some", features, (48 << 10, 1 << 20, 32 << 20), 2)
    assert (target.vector_bytes, target.vector_registers, target.has_fma, target.has_masked_memory) == (size, registers, fma, masks)
    assert target.has_scaleb is scaleb
    assert target.lanes(dtypes.float32) == size // 4
    assert target.key == f"{arch}/some/{','.join(features)}/l1 48k/l2 1m/l3 32m/t2"


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SVOD_THREADS", raising=False)
    target = host_target()
    assert target.arch in ISA and target.cpu and set(target.features) <= set(ISA[target.arch])
    assert target.l1 >= 8 << 10 and target.l2 >= 64 << 10 and target.threads == usable_cores()
    assert host_target() is target
    assert host_target(1).threads == 1 and host_target(1 << 20).threads == usable_cores(), "no limit raises the number of cores"
    monkeypatch.setenv("SVOD_THREADS", "1")
    assert host_target().threads == 1
    with pytest.raises(DeviceError, match="threads"):
        host_target(0)


def test_an_unknown_architecture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    host._processor.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(DeviceError, match="riscv64"):
        host._processor()
    monkeypatch.undo()
    host._processor.cache_clear()


def test_importing_the_module_does_not_load_llvm() -> None:
    code = "import sys, svod.compile.cpu.host, svod.compile.llvm.render; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_asking_again_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = host_target()
    monkeypatch.delattr(host, "_processor")
    assert host_target() is first


def test_tiles_are_a_feature_only_where_the_system_grants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM reports tile instructions if the processor has them, but Linux lets a process use tile registers only after a request."""
    features = host._processor()[2]
    assert "amx" not in features or host.may_use_tiles()
    monkeypatch.setattr(host, "may_use_tiles", lambda: False)
    assert set(host._processor.__wrapped__()[2]) == set(features) - {"amx"}
