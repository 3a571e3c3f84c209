"""Keeps large weights where they are in a model's bytes, so that a model of 1 GB takes 1 GB only once.

Protobuf copies every byte that it parses. So this module follows the lengths of the messages that contain tensors, without parsing, and
gives protobuf a copy of the model in which each large tensor is external data, at its offset in the model itself.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

MAPPED_WEIGHT_BYTES = 4096            # least bytes of a weight that is not copied
TENSOR = "tensor"
# The messages that lead to tensors: field number → type of the message in that field.
_GRAPH: dict[int, Any] = {5: TENSOR}
_ATTRIBUTE: dict[int, Any] = {5: TENSOR, 10: TENSOR, 6: _GRAPH, 11: _GRAPH}
_NODE: dict[int, Any] = {5: _ATTRIBUTE}
_GRAPH[1] = _NODE
_MODEL: dict[int, Any] = {7: _GRAPH, 25: {7: _NODE}}
RAW_DATA, EXTERNAL_DATA = 9, 13         # fields of TensorProto


def small_model(data: memoryview, name: str) -> bytes:
    """The bytes of a model in which large tensors are external data of the file `name`, which is the model itself. Raises ValueError for
    bytes that are no protobuf message."""
    return _small(data, 0, len(data), _MODEL, name)


def _small(data: memoryview, start: int, end: int, fields: dict[int, Any], name: str) -> bytes:
    out = bytearray()
    for number, begin, inner, last in _fields(data, start, end):
        kind = fields.get(number) if last - inner >= MAPPED_WEIGHT_BYTES else None
        if kind is None:
            out += data[begin:last]
        else:
            out += _message(number, _tensor(data, inner, last, name) if kind is TENSOR else _small(data, inner, last, kind, name))
    return bytes(out)


def _tensor(data: memoryview, start: int, end: int, name: str) -> bytes:
    fields = list(_fields(data, start, end))
    raw = [(inner, last) for number, _, inner, last in fields if number == RAW_DATA]
    if not raw or raw[-1][1] - raw[-1][0] < MAPPED_WEIGHT_BYTES or any(number == EXTERNAL_DATA for number, *_ in fields):
        return bytes(data[start:end])
    first, last = raw[-1]
    note = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", name), ("offset", str(first)), ("length", str(last - first))):
        note.external_data.add(key=key, value=value)
    kept = [bytes(data[begin:stop]) for number, begin, _, stop in fields if number != RAW_DATA]
    return b"".join([*kept, bytes(note.SerializeToString())])


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _fields(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: (number, offset of the field, offset of its content, end offset of both). Raises ValueError."""
    while at < end:
        begin = at
        tag, at = _number(data, at, end)
        match tag & 7:
            case 0:
                _, stop = _number(data, at, end)
            case 1:
                stop = at + 8
            case 2:
                length, at = _number(data, at, end)
                stop = at + length
            case 5:
                stop = at + 4
            case kind:
                raise ValueError(f"a field of the wire type {kind} at byte {begin}")
        if stop > end:
            raise ValueError(f"a field that begins at byte {begin} ends behind its message")
        yield tag >> 3, begin, at, stop
        at = stop


def _number(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number that does not end at byte {at}")
