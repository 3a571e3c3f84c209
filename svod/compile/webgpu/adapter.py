"""The adapters of this machine, their numbers, and their properties as `Target`s.

    WEBGPU      the first adapter        WEBGPU:1      the second

Adapters are numbered by kind: discrete cards, integrated and virtual ones, then drivers in software. Each card is listed once there, by the
best driver interface that supports it. The same cards through other interfaces come after all of these."""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from svod.core.machine.target import Target
from svod.errors import DeviceError
from svod.system.process.cores import machine_cores

NAME = "WEBGPU"
DRIVER_INTERFACES = ("Vulkan", "Metal", "D3D12", "OpenGL")     # wgpu's backends (driver interfaces), the best first
SYSTEM_INTERFACES = ("Vulkan", "Metal")       # interfaces that are the only one of their operating system
ADAPTER_KINDS = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown")    # kinds of adapters, the best first
NUMBERS = {"shader-f16": "float16", "shader-f64": "float64", "shader-int64": "int64"}
"""wgpu's name of an adapter's feature → the name of the feature in targets."""
SUBGROUP_FEATURE = "subgroup"    # wgpu's name of the feature
WISHED = (*NUMBERS, "timestamp-query", SUBGROUP_FEATURE)
LIMITS = ("max-buffer-size", "max-storage-buffer-binding-size", "max-storage-buffers-per-shader-stage", "max-bindings-per-bind-group",
          "max-compute-workgroup-storage-size", "max-compute-invocations-per-workgroup", "max-compute-workgroup-size-x",
          "max-compute-workgroups-per-dimension")
"""Limits of a device, which svod requests as high as the adapter allows."""
SOFTWARE_LANES = 8      # 32-bit numbers in a vector register of 256 bits; Mesa's software driver runs one thread in each
WARPS = {0x10DE: 32}    # id of a vendor whose cards all have the same subgroup size → that size; NVIDIA
INSTALL = "install Mesa's software driver (on Debian: apt-get install mesa-vulkan-drivers), or the driver of your graphics card"


def package() -> Any:
    """Import the package wgpu. Raises DeviceError if it is not installed, or does not load."""
    if importlib.util.find_spec("wgpu") is None:
        raise DeviceError(f"{NAME} needs the package wgpu, which is not installed; pip install 'svod[webgpu]'")
    try:
        return importlib.import_module("wgpu")
    except (ImportError, OSError) as error:
        raise DeviceError(f"the package wgpu, which {NAME} needs, does not load ({error}); install it again") from error


def adapters() -> list[Any]:
    """List the adapters of this machine, in the order of their device numbers."""
    return _adapters(os.getpid())       # a forked process must query its drivers again


@cache
def _adapters(process: int) -> list[Any]:
    wgpu = package()
    extras = importlib.import_module("wgpu.backends.wgpu_native.extras")
    with contextlib.suppress(RuntimeError):         # raised if this process has an instance of wgpu already, whose adapters are used then
        extras.set_instance_extras(backends=["Vulkan", "Metal", "DX12"])
    return in_order(wgpu.gpu.enumerate_adapters_sync())


def in_order(found: Iterable[Any]) -> list[Any]:
    """Sort the adapters of the driver interfaces that svod uses, the best first. An adapter for a card that a better interface also lists
    comes after all others."""
    known = sorted((a for a in found if a.info["backend_type"] in DRIVER_INTERFACES),
                   key=lambda a: DRIVER_INTERFACES.index(a.info["backend_type"]))

    def is_another_way(adapter: Any) -> bool:
        """Whether a better interface lists the same card. OpenGL reports device id 0 for every card; only the vendor is compared then."""
        info = adapter.info
        better = known[:next(i for i, a in enumerate(known) if a.info["backend_type"] == info["backend_type"])]
        return any(a.info["vendor_id"] == info["vendor_id"] and info["device_id"] in (0, a.info["device_id"]) for a in better)

    def rank(adapter: Any) -> tuple[bool, int]:
        kind = adapter.info["adapter_type"]
        return is_another_way(adapter), ADAPTER_KINDS.index(kind) if kind in ADAPTER_KINDS else len(ADAPTER_KINDS)
    return sorted(known, key=rank)


def adapter(number: int = 0) -> Any:
    """Return the adapter with a number. Raises DeviceError if there is none."""
    found = adapters()
    if not found:
        raise DeviceError(f"{NAME} finds no adapter on this machine: there is no driver for Vulkan, Metal or Direct3D 12; {INSTALL}")
    if number >= len(found):
        listed = "; ".join(f"{device_name(n)} is {describe(a.info)}" for n, a in enumerate(found))
        raise DeviceError(f"there is no adapter {device_name(number)}: {listed}")
    return found[number]


def device_name(number: int) -> str:
    """Return the name of an adapter in svod: WEBGPU, WEBGPU:1."""
    return f"{NAME}:{number}" if number else NAME


def describe(info: Any) -> str:
    """Describe an adapter for messages: its name, interface and kind."""
    return f"{info['device'] or info['vendor'] or 'an adapter without a name'} ({info['backend_type']}, {info['adapter_type']})"


def adapter_name(info: Any) -> str:
    """Return the name of an adapter in keys, without its driver's version: `llvmpipe`, `nvidia-geforce-rtx-4090`. A card through a
    different interface than its system's own gets different code: `llvmpipe-opengl`."""
    name = re.sub(r"\([^)]*\)", "", str(info["device"] or info["vendor"]))
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or f"{info['vendor_id']:04x}-{info['device_id']:04x}"
    return name if info["backend_type"] in SYSTEM_INTERFACES else f"{name}-{info['backend_type'].lower()}"


def subgroup_of(adapter: Any) -> int:
    """Return the subgroup size of an adapter if it is the same in all kernels; 0 if it varies or is unknown.

    wgpu reports the smallest and the largest size, or zeros if it does not forward the driver's numbers. Then the size of a card of a known
    vendor is taken from WARPS. Mesa's software driver executes a subgroup in the lanes of a vector register, whose bits are in its name."""
    if SUBGROUP_FEATURE not in adapter.features:
        return 0
    least, greatest = subgroup_sizes(adapter)
    if greatest == 0:
        bits = re.search(r"(\d+) bits", str(adapter.info["device"])) if adapter.info["adapter_type"] == "CPU" else None
        least = greatest = int(bits[1]) // 32 if bits else WARPS.get(adapter.info["vendor_id"], 0)
    return least if least == greatest > 1 and least & (least - 1) == 0 else 0


def subgroup_sizes(adapter: Any) -> tuple[int, int]:
    """Return the smallest and the largest subgroup size of an adapter from wgpu's native call; the package's dictionary of an adapter lacks
    them."""
    api = importlib.import_module("wgpu.backends.wgpu_native._api")
    info = api.new_struct_p("WGPUAdapterInfo *")
    if api.libf.wgpuAdapterGetInfo(adapter._internal, info) != api.lib.WGPUStatus_Success:
        return 0, 0
    sizes = int(info.subgroupMinSize), int(info.subgroupMaxSize)
    api.libf.wgpuAdapterInfoFreeMembers(info[0])
    return sizes


@cache
def _target(process: int, number: int) -> Target:
    found = adapter(number)
    limits = found.limits
    threads = int(min(limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]))
    groups = int(limits["max-compute-workgroups-per-dimension"])
    features = tuple(sorted(svod for theirs, svod in NUMBERS.items() if theirs in found.features))
    software, subgroup = found.info["adapter_type"] == "CPU", subgroup_of(found)
    units = machine_cores() if software else 0      # WebGPU does not report the number of units of a graphics card
    return Target(arch="wgsl", cpu=adapter_name(found.info), features=features, vector_bytes=16, vector_registers=64, l1=16 << 10,
                  l2=1 << 20, l3=0, threads=1, has_fma=False, has_strict_floats=False, has_float64="float64" in features,
                  has_masked_memory=False, has_non_temporal=False, group_threads=threads,
                  shared_bytes=int(limits["max-compute-workgroup-storage-size"]), device=device_name(number), units=units,
                  subgroup=subgroup, software_lanes=(subgroup or SOFTWARE_LANES) if software else 0,
                  global_limits=(groups, groups, groups), local_limits=(threads, threads, int(limits["max-compute-workgroup-size-z"])))


def adapter_target(number: int = 0) -> Target:
    """Return an adapter as a target. Raises DeviceError if there is no adapter with the number."""
    return _target(os.getpid(), number)
