"""The host as a target, on recorded trees of /proc and /sys, and on the real machine."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from svod.compile.cpu import host
from svod.compile.cpu.host import (
    FALLBACK_CACHES,
    cache_sizes,
    cgroup_cpus,
    host_facts,
    host_target,
    make_target,
    parse_cpu_list,
    usable_threads,
)
from svod.core.ir.dtype import dtypes
from svod.core.machine.isa import ISA, isa_features, llvm_features
from svod.errors import DeviceError

CPU = "sys/devices/system/cpu"
MAX = "max 100000"

# What lscpu calls "L1d 48K, L2 1M, L3 32M, 1 thread per core" and so on: (level, type, size, shared_cpu_list) of cpu0, thread siblings.
MACHINES: dict[str, tuple[list[tuple[int, str, str, str]], str, tuple[int, int, int]]] = {
    "EPYC Turin, virtual": ([(1, "Data", "48K", "0"), (1, "Instruction", "32K", "0"), (2, "Unified", "1024K", "0"),
                             (3, "Unified", "32768K", "0-1")], "0", (48 << 10, 1 << 20, 32 << 20)),
    "Ryzen 7950X, SMT": ([(1, "Data", "32K", "0,16"), (1, "Instruction", "32K", "0,16"), (2, "Unified", "1024K", "0,16"),
                          (3, "Unified", "32768K", "0-7,16-23")], "0,16", (32 << 10, 1 << 20, 32 << 20)),
    "Xeon 8480C, SMT": ([(1, "Data", "48K", "0,56"), (1, "Instruction", "32K", "0,56"), (2, "Unified", "2048K", "0,56"),
                         (3, "Unified", "107520K", "0-55,56-111")], "0,56", (48 << 10, 2 << 20, 105 << 20)),
    "Alder Lake-N, four cores share an L2": ([(1, "Data", "32K", "0"), (1, "Instruction", "64K", "0"), (2, "Unified", "2048K", "0-3"),
                                              (3, "Unified", "6144K", "0-3")], "0", (32 << 10, 512 << 10, 6 << 20)),
    "Graviton 3, no L3 shown": ([(1, "Data", "64K", "0"), (1, "Instruction", "64K", "0"), (2, "Unified", "1024K", "0")], "0",
                                (64 << 10, 1 << 20, 0)),
    "a container without sizes": ([(1, "Data", "", ""), (2, "Unified", "", "")], "", FALLBACK_CACHES),
    "no cache directory": ([], "", FALLBACK_CACHES),
}

# /proc/self/cgroup, files below /sys/fs/cgroup, CPUs granted
CGROUPS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "v2, no limit": ("0::/user.slice/session.scope\n", {"user.slice/cpu.max": MAX, "user.slice/session.scope/cpu.max": MAX}, None),
    "v2, docker --cpus 1.5": ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    "v2, limit on the parent": ("0::/pods/pod1/ctr\n", {"pods/pod1/cpu.max": "200000 100000", "pods/pod1/ctr/cpu.max": MAX}, 2.0),
    "v2, the tightest counts": ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "300000 100000"}, 3.0),
    "v2, path of the host": ("0::/../../outside/ctr\n", {"cpu.max": "250000 50000"}, 5.0),
    "v1, named mount": ("4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
                        {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, 2.5),
    "v1, namespaced": ("4:cpuacct,cpu:/docker/abc\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    "v1, unlimited": ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "hybrid": ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "unified/cgroup.procs": "1"}, None),
    "malformed": ("nonsense\n0::/\n", {"cpu.max": "many 100000"}, None),
    "none": ("", {}, None),
}


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


@pytest.mark.parametrize("name", MACHINES)
def test_cache_sizes_of_recorded_machines(name: str, tmp_path: Path) -> None:
    caches, siblings, want = MACHINES[name]
    for k, (level, kind, size, shared) in enumerate(caches):
        for file, text in (("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            write(tmp_path, f"{CPU}/cpu0/cache/index{k}/{file}", text)
    write(tmp_path, f"{CPU}/cpu0/topology/thread_siblings_list", siblings)
    assert cache_sizes(tmp_path) == want


@pytest.mark.parametrize("name", CGROUPS)
def test_cgroup_quotas(name: str, tmp_path: Path) -> None:
    listing, files, want = CGROUPS[name]
    write(tmp_path, "proc/self/cgroup", listing)
    for path, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{path}", text)
    assert cgroup_cpus(tmp_path) == want
    assert usable_threads(root=tmp_path, cpus=8) == (8 if want is None else max(1, int(want)))
    assert usable_threads(2, root=tmp_path, cpus=8) == (2 if want is None else max(1, min(2, int(want))))


def test_threads_never_exceed_any_limit(tmp_path: Path) -> None:
    assert usable_threads(64, root=tmp_path, cpus=2) == 2
    assert usable_threads(1, root=tmp_path, cpus=2) == 1
    assert usable_threads(root=tmp_path, cpus=0) == 1


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,5,8-9") == [0, 1, 2, 5, 8, 9]
    assert parse_cpu_list("3") == [3] and parse_cpu_list("") == [] and parse_cpu_list("a-b") == []


def test_instruction_sets_count_as_a_whole() -> None:
    every = [f for needs in ISA["x86_64"].values() for f in needs]
    assert isa_features("x86_64", every) == tuple(sorted(ISA["x86_64"]))
    # a virtual machine that hides one part of AVX-512 has none of it
    assert "avx512f" not in isa_features("x86_64", set(every) - {"avx512vl"})
    assert isa_features("x86_64", []) == ()
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
    assert target.l1 >= 8 << 10 and target.l2 >= 64 << 10 and target.threads == usable_threads()
    assert host_target() is target
    assert host_target(1).threads == 1
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


def test_facts_are_read_and_what_is_missing_left_out(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nmicrocode\t: 0x1000065\n"
                                    "flags\t\t: fpu hypervisor avx2\n\nprocessor\t: 1\nmodel name\t: other\n")
    write(tmp_path, f"{CPU}/cpu0/cpufreq/scaling_governor", "performance")
    write(tmp_path, f"{CPU}/smt/active", "0")
    facts = host_facts(tmp_path)
    assert facts["model"] == "AMD EPYC" and facts["microcode"] == "0x1000065" and facts["hypervisor"] == "yes"
    assert facts["governor"] == "performance" and facts["smt"] == "0" and "numa" not in facts
    assert "model" not in host_facts(tmp_path / "empty") and host_facts(tmp_path / "empty")["os"]


def test_importing_the_module_does_not_load_llvm() -> None:
    code = "import sys, svod.compile.cpu.host, svod.compile.llvm.render; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_asking_again_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = host_target()
    monkeypatch.delattr(host, "_processor")
    assert host_target() is first


def test_tiles_are_a_feature_only_where_the_system_grants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM says what the processor has; Linux keeps the state of tile registers from processes that did not ask."""
    features = host._processor()[2]
    assert "amx" not in features or host.may_use_tiles()
    monkeypatch.setattr(host, "may_use_tiles", lambda: False)
    assert set(host._processor.__wrapped__()[2]) == set(features) - {"amx"}
