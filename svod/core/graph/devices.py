"""The device on which the value of a graph node is computed, and values that have parts on several devices.

A value is computed on the device of the memory that it reads; a value that reads no memory can be computed on any device.
"""
from __future__ import annotations

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp, remembered
from svod.core.machine.target import DISK, HOST
from svod.errors import DeviceError


class _Devices:
    """Whether this process has made a DEVICE node for a device other than the host. Until then devices need no checks."""

    are_named = False


_NO_VALUE = frozenset({Ops.DEVICE, Ops.UNIQUE, Ops.LUNIQUE})


@remembered("device")
def device_of(u: UOp) -> str | None:
    """Return the device on which a graph node is computed: the device of the memory that it reads. None for a value that reads no memory,
    which can be computed on any device. Raises DeviceError for a node whose operands are on two devices."""
    if u.op is Ops.BUFFER or u.op is Ops.COPY:
        name: str = u.src[1].arg
        return name
    if u.op is Ops.MSTACK or u.op is Ops.SINK:      # values side by side: the first one decides
        return device_of(u.src[0]) if u.src else None
    if u.op is Ops.MSELECT and (stack := stack_of(u.src[0])) is not None and 0 <= u.arg < len(stack.src):
        return device_of(stack.src[u.arg])
    found = None
    for s in u.src:
        other = device_of(s) if s.op not in _NO_VALUE else None
        if other is not None and other != found:
            if found is not None:
                name = u.arg[0].lower() if u.op is Ops.CUSTOM_FUNCTION else u.op.value
                computing = [device for device in (found, other) if not device.startswith(DISK)]
                which = "one of them" if len(computing) == 2 else "what lies in a file"
                where = " or ".join(f".to({device!r})" for device in computing or [HOST])
                raise DeviceError(f"{name} of values on {found} and on {other}: an operation computes on one device; copy {which}, {where}")
            found = other
    return found


def are_devices_named() -> bool:
    """Return whether this process has made a node for a device other than the host."""
    return _Devices.are_named


def readers_devices(sink: UOp) -> dict[UOp, set[str]]:
    """Map each value that reads no memory to the devices of its readers; an output of `sink` counts as read on the host."""
    found: dict[UOp, set[str]] = {}
    for u in reversed(list(sink.toposort())):
        own = device_of(u) if u.op is not Ops.SINK else HOST
        for s in u.src:
            if s.op not in _NO_VALUE and device_of(s) is None:
                found.setdefault(s, set()).update((own,) if own is not None else found.get(u, ()))
    return found


@remembered("stack")
def stack_of(u: UOp) -> UOp | None:
    """Return an MSTACK that a value of several devices is computed from; None for a value of one device."""
    if u.op is Ops.MSTACK:
        return u
    return None if u.op in (Ops.MSELECT, Ops.CALL, Ops.END) else next((found for s in u.src if (found := stack_of(s)) is not None), None)


def is_transfer(copy: UOp) -> bool:
    """Whether a COPY moves a value from one device to another. A source that reads no memory is computed on the target device instead."""
    return device_of(copy.src[0]) not in (None, copy.src[1].arg)


def device_node(name: str) -> UOp:
    """Return the DEVICE node of a name."""
    if name != HOST:
        _Devices.are_named = True
    return UOp(Ops.DEVICE, dtypes.void, (), name)


def on_one_device(u: UOp) -> UOp:
    """Return u. Raises DeviceError if its operands are on two devices."""
    if _Devices.are_named:
        device_of(u)
    return u
