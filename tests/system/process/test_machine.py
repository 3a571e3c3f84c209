"""Cores, caches, memory and facts, on recorded trees of /proc and /sys."""
from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from svod.system.process import memory
from svod.system.process.cores import QUOTA_SECONDS, Quota, cpu_quota, parse_cpu_list, usable_cores
from svod.system.process.memory import group_memory, usable_memory
from svod.system.process.processor import FALLBACK_CACHES, cache_sizes, host_facts
from svod.system.process.system_files import processes_of, processes_with

CPU = "sys/devices/system/cpu"
MAX = "max 100000"

# machines as lscpu describes them ("L1d 48K, L2 1M, L3 32M, 1 thread per core"): (level, type, size, shared_cpu_list) of cpu0's caches,
# thread siblings, expected sizes
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

# text of /proc/self/cgroup, files below /sys/fs/cgroup, expected CPUs
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


def test_a_system_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is simulated, because root may search every directory."""
    def refuse(*args: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "glob", refuse)
    assert cache_sizes(tmp_path) == FALLBACK_CACHES
    assert processes_with("A=B") == processes_of("/tmp") == []


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
    assert cpu_quota(tmp_path) == want
    quota = Quota(tmp_path)
    assert usable_cores(cpus=8, quota=quota) == (8 if want is None else max(1, int(want)))
    assert usable_cores(2, quota) == (2 if want is None else max(1, min(2, int(want))))
    assert usable_cores(0, quota) == 1


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,5,8-9") == [0, 1, 2, 5, 8, 9]
    assert parse_cpu_list("3") == [3] and parse_cpu_list("") == [] and parse_cpu_list("a-b") == []


def test_a_quota_that_changes_is_seen(tmp_path: Path) -> None:
    now = 0.0
    quota = Quota(tmp_path, lambda: now)
    write(tmp_path, "proc/self/cgroup", "0::/a\n")
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", "400000 100000")
    assert usable_cores(cpus=64, quota=quota) == 4
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", "200000 100000")
    assert usable_cores(cpus=64, quota=quota) == 4, "reading takes longer than preparing a small kernel"
    now += QUOTA_SECONDS
    assert usable_cores(cpus=64, quota=quota) == 2
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", MAX)
    now += QUOTA_SECONDS
    assert usable_cores(cpus=64, quota=quota) == 64


# text of /proc/self/cgroup, files below /sys/fs/cgroup, expected bytes
UNLIMITED = "9223372036854771712"
MEMORY: dict[str, tuple[str, dict[str, str], int | None]] = {
    "v2, no limit": ("0::/a\n", {"a/memory.max": "max", "a/memory.high": "max"}, None),
    "v2, its own group": ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "max", "a/b/memory.max": "3000000000"}, 3000000000),
    "v2, the parent's": ("0::/a/b\n", {"a/memory.max": "2000000000", "a/b/memory.max": "3000000000"}, 2000000000),
    "v2, where it is slowed down": ("0::/a\n", {"a/memory.max": "3000000000", "a/memory.high": "1500000000"}, 1500000000),
    "v2, in a container": ("0::/\n", {"memory.max": "5000000000"}, 5000000000),
    "v1": ("9:cpu:/\n4:memory:/job/7\n", {"memory/memory.limit_in_bytes": UNLIMITED, "memory/job/memory.limit_in_bytes": "6000000000",
                                         "memory/job/7/memory.limit_in_bytes": "4000000000"}, 4000000000),
    "v1, path of the host": ("4:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": "2500000000"}, 2500000000),
    "both": ("4:memory:/x\n0::/y\n", {"memory/x/memory.limit_in_bytes": "2500000000", "unified/y/memory.max": "1200000000"}, 1200000000),
    "malformed": ("4:memory\n0::/\n", {"memory.max": "plenty"}, None),
    "none": ("", {}, None),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_limits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing, files, want = MEMORY[name]
    write(tmp_path, "proc/self/cgroup", listing)
    for path, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{path}", text)
    assert group_memory(tmp_path) == want
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 << 30)
    assert usable_memory(tmp_path) == (8 << 30 if want is None else want)
    monkeypatch.setattr(memory, "machine_memory", lambda: 1 << 30)
    assert usable_memory(tmp_path) == 1 << 30
    monkeypatch.setattr(memory, "machine_memory", lambda: 0)
    assert usable_memory(tmp_path) == (want or 0)


def test_facts_are_read_and_what_is_missing_left_out(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nmicrocode\t: 0x1000065\n"
                                    "flags\t\t: fpu hypervisor avx2\n\nprocessor\t: 1\nmodel name\t: other\n")
    write(tmp_path, f"{CPU}/cpu0/cpufreq/scaling_governor", "performance")
    write(tmp_path, f"{CPU}/smt/active", "0")
    facts = host_facts(tmp_path)
    assert facts["model"] == "AMD EPYC" and facts["microcode"] == "0x1000065" and facts["hypervisor"] == "yes"
    assert facts["governor"] == "performance" and facts["smt"] == "0" and "numa" not in facts
    assert "model" not in host_facts(tmp_path / "empty") and host_facts(tmp_path / "empty")["os"]
