"""Weights inside a file, mapped instead of read: a model of 1 GB takes 1 GB once.

Protobuf copies every byte that it parses. So the file is mapped, the messages on the way to its initializers are walked by their lengths,
and
the parser is given the same model with a note in place of each large weight: external data, in this file, at that offset.
"""
from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx

LARGE = 4096            # bytes of a weight that is mapped
GRAPH, INITIALIZER = 7, 5               # fields of ModelProto and GraphProto
RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 9, 13, 14      # fields of TensorProto


def small_model(path: Path) -> bytes:
    """The bytes of the model in a file, without its large weights, which are external data of the file itself. Raises OSError, ValueError
    for what is no protobuf message."""
    with open(path, "rb") as f:
        size = f.seek(0, 2)
        if size == 0:
            return b""
        data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    out = bytearray()
    for number, begin, start, end in _fields(data, 0, len(data)):
        out += _message(GRAPH, _graph(data, start, end, path.name)) if number == GRAPH else data[begin:end]
    return bytes(out)


def _graph(data: memoryview, start: int, end: int, name: str) -> bytes:
    out = bytearray()
    for number, begin, inner, last in _fields(data, start, end):
        out += _message(INITIALIZER, _tensor(data, inner, last, name)) if number == INITIALIZER else data[begin:last]
    return bytes(out)


def _tensor(data: memoryview, start: int, end: int, name: str) -> bytes:
    fields = list(_fields(data, start, end))
    raw = [(inner, last) for number, _, inner, last in fields if number == RAW_DATA]
    if not raw or raw[-1][1] - raw[-1][0] < LARGE or any(number == EXTERNAL_DATA for number, *_ in fields):
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
    """The fields of a message: number, where the field begins, where its content begins, where both end. Raises ValueError."""
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
