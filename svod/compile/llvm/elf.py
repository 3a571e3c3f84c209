"""ELF objects: the architecture and the symbols of an object that LLVM made."""
from __future__ import annotations

import struct
from typing import NamedTuple

from svod.errors import CompileError

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}  # number in the field e_machine of an ELF header → architecture


class ObjectSymbol(NamedTuple):
    """An entry of an object's symbol table. `at`: where in the object its name begins, in bytes. `is_defined`: whether the object contains
    it; its code takes `size` bytes. `is_global`: whether other objects see it."""

    name: str
    at: int
    size: int
    is_defined: bool
    is_global: bool


def architecture_of(code: bytes) -> str:
    """Return the architecture of an object. Raises CompileError if `code` is not a 64-bit little-endian ELF object of a known one."""
    arch = ELF_MACHINES.get(int.from_bytes(code[18:20], "little"))
    if code[:6] != b"\x7fELF\x02\x01" or len(code) < 64 or arch is None:
        raise CompileError(f"not a 64-bit little-endian ELF object for {' or '.join(TRIPLES)}")
    return arch


def symbols_of(code: bytes) -> list[ObjectSymbol]:
    """Return the named symbols of an object. Raises CompileError if `code` is not an object."""
    architecture_of(code)
    sections_at, = struct.unpack_from("<Q", code, 40)
    entry_size, count = struct.unpack_from("<HH", code, 58)
    # per section header: name, type, flags, address, offset, size, link, info, alignment, entry size
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + k * entry_size) for k in range(count)]
    symbols: list[ObjectSymbol] = []
    for header in headers:
        if header[1] != 2:  # SHT_SYMTAB
            continue
        strings = headers[header[6]][4]
        for at in range(header[4] + 24, header[4] + header[5], 24):  # the first symbol is empty
            name, info, _, section, _, size = struct.unpack_from("<IBBHQQ", code, at)
            if name:
                start = strings + name
                symbols.append(ObjectSymbol(code[start:code.index(b"\0", start)].decode(), start, size, section != 0, info >> 4 == 1))
    return symbols


def undefined_symbols(code: bytes) -> tuple[str, ...]:
    """Return the external names that an object needs. Raises CompileError if `code` is not an object."""
    return tuple(sorted(s.name for s in symbols_of(code) if not s.is_defined))
