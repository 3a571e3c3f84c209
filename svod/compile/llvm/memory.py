"""Memory instructions of LINEAR as LLVM text: pointers, contiguous, strided and indexed accesses, all with masks.

How an access that is masked off is kept from touching memory:

    mask               contiguous                                 strided, indexed
    per lane           llvm.masked.load/store                     as below, by lane
    scalar, vector     loads as below; a store with the mask in all lanes, where that is one instruction, else as below
    scalar             the address becomes that of a private stack slot: no branch, so blocks stay large
    any, on a GPU      a branch around it, which becomes a predicate; by lane, and for a vector also in one piece where all lanes hold

A strided load with a small stride reads whole vectors between its first and its last lane (never beyond) and shuffles; everything
else goes by lane, or through gather and scatter instructions where `gathers_in_hardware` says so.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.llvm.text import Writer, memory_type, refuse, register_type
from svod.core.ir.dtype import DType
from svod.core.machine.target import Target


def gathers_in_hardware(target: Target, bits: int) -> bool:
    """Whether to use gather and scatter instructions: a gather of 16 float32 takes 4.0 ns on Zen 5, lane by lane 4.6 ns and more
    instructions. AVX2 gathers without mask registers; there it goes by lane."""
    return "avx512f" in target.features and bits >= 32


def masks_in_hardware(target: Target, bits: int) -> bool:
    """Whether a masked vector access of `bits`-wide elements is one instruction."""
    if not target.has_masked_memory:
        return False
    return bits >= 32 or "avx512f" in target.features or target.arch != "x86_64"


def _element(dtype: DType) -> str:
    return memory_type(dtype.name, 1)


def address_of(w: Writer, ptr: int, idx: int, offset: int) -> str:
    """The address `ptr[idx + offset]`, with the offset as a constant of its own that addressing modes absorb.

    Not `inbounds`: the base of a masked or padded access may lie outside the buffer."""
    elem = _element(w.code[ptr].dtype)
    index = w.code[idx]
    if index.op == "CONST":
        offset += index.arg
        base = w.value[ptr]
    else:
        known = w.addresses.get((ptr, idx))
        if known is None:
            operand = w.value[idx]
            if index.dtype.bits < 64:
                operand = w.temp(f"{'sext' if index.dtype.kind == 'i' else 'zext'} {register_type(index.dtype.name, 1)} {operand} to i64")
            known = w.addresses[ptr, idx] = w.temp(f"getelementptr {elem}, ptr {w.value[ptr]}, i64 {operand}")
        base = known
    return base if offset == 0 else w.temp(f"getelementptr {elem}, ptr {base}, i64 {offset}")


def _arg(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _pointer(w, i, arg)


def _temp(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _pointer(w, i, w.temp_base + arg)


def _pointer(w: Writer, i: int, slot: int) -> None:
    at = w.temp(f"getelementptr ptr, ptr %args, i64 {slot}")
    w.lines.append(f"  %v{i} = load ptr, ptr {at}, align 8")
    w.value[i] = f"%v{i}"


def _scratch(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.lines.append(f"  %v{i} = getelementptr i8, ptr %scratch, i64 {arg}")
    w.value[i] = f"%v{i}"


def _var(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    at = w.temp(f"getelementptr i64, ptr %vars, i64 {w.variables[arg]}")
    w.lines.append(f"  %v{i} = load i64, ptr {at}, align 8")
    w.value[i] = f"%v{i}"


def _from_memory(w: Writer, i: int, dtype: DType, lanes: int, loaded: str) -> None:
    """Make `loaded`, of the memory type, the value of instruction i."""
    if dtype.kind == "b":
        loaded = w.temp(f"icmp ne {memory_type('bool', lanes)} {loaded}, {'0' if lanes == 1 else 'zeroinitializer'}")
    w.value[i] = loaded


def _to_memory(w: Writer, dtype: DType, lanes: int, operand: str) -> str:
    if dtype.kind == "b":
        return w.temp(f"zext {register_type('bool', lanes)} {operand} to {memory_type('bool', lanes)}")
    return operand


def _pick(w: Writer, mask: str, address: str, mem: str, content: str = "poison") -> str:
    """`address` where the scalar mask holds, else a slot of the memory type `mem` that holds the constant `content`."""
    return w.temp(f"select i1 {mask}, ptr {address}, ptr {w.slot(mem, content)}")


def _lane_mask(w: Writer, mask: int, lanes: int) -> str:
    """The operand of a per-lane mask over `lanes`."""
    return w.value[mask] if w.code[mask].lanes == lanes else w.broadcast("i1", lanes, w.value[mask])


def _scalar_of(w: Writer, mask: int) -> str | None:
    """The scalar that is the mask of all lanes, or None for a mask of lanes that differ."""
    if w.code[mask].op == "SPLAT":
        return w.value[w.code[mask].src[0]]
    return w.value[mask] if w.code[mask].lanes == 1 else None


def _reverse(w: Writer, vec: str, lanes: int, operand: str) -> str:
    order = ", ".join(f"i32 {k}" for k in range(lanes - 1, -1, -1))
    return w.temp(f"shufflevector {vec} {operand}, {vec} poison, <{lanes} x i32> <{order}>")


# -- contiguous -------------------------------------------------------------------------------------
def _load(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    address = address_of(w, src[0], src[1], arg)
    if len(src) == 2:
        mem, size = memory_type(dtype.name, lanes), w.family.alignment(w, src[0], src[1], arg, lanes)
        if dtype.kind == "b":
            _from_memory(w, i, dtype, lanes, w.temp(f"load {mem}, ptr {address}, align {size}"))
        else:
            w.lines.append(f"  %v{i} = load {mem}, ptr {address}, align {size}")
            w.value[i] = f"%v{i}"
        return
    if w.family.branches:
        align = w.family.alignment(w, src[0], src[1], arg, lanes)
        _branched_load(w, i, dtype, lanes, _neighbours(w, dtype, address, lanes, 1), src[2], src[3], align)
        return
    _masked_load(w, i, dtype, lanes, address, src[2], src[3], reverse=False)


def _neighbours(w: Writer, dtype: DType, address: str, lanes: int, stride: int) -> list[str]:
    """The addresses of lanes that lie `stride` elements apart."""
    elem = _element(dtype)
    return [address if k == 0 else w.temp(f"getelementptr {elem}, ptr {address}, i64 {k * stride}") for k in range(lanes)]


def _masked_load(w: Writer, i: int, dtype: DType, lanes: int, address: str, mask: int, alt: int, reverse: bool) -> None:
    """`lanes` contiguous elements; `reverse`: lane 0 is the last of them (the mask and `alt` count lanes)."""
    mem, size = memory_type(dtype.name, lanes), dtype.itemsize
    of_all = _scalar_of(w, mask)
    if of_all is not None:
        # a masked access whose page is not mapped takes hundreds of cycles, and an address that is masked off may be anything: the mask
        # chooses an address. A constant alternative waits in the slot: nothing to select after the load, which may be part of its user
        constant = w.code[alt].op == "CONST" and dtype.kind != "b"
        content = w.value[alt] if constant else "poison"
        loaded = w.temp(f"load {mem}, ptr {_pick(w, of_all, address, mem, content)}, align {size}")
        _from_memory(w, i, dtype, lanes, _reverse(w, mem, lanes, loaded) if reverse else loaded)
        if not constant:
            reg = register_type(dtype.name, lanes)
            w.value[i] = w.temp(f"select i1 {of_all}, {reg} {w.value[i]}, {reg} {w.value[alt]}")
        return
    bits = f"<{lanes} x i1>"
    lane_mask, other = _lane_mask(w, mask, lanes), _to_memory(w, dtype, lanes, w.value[alt])
    if reverse:
        lane_mask, other = _reverse(w, bits, lanes, lane_mask), _reverse(w, mem, lanes, other)
    name = w.masked("load", _element(dtype), lanes)
    loaded = w.temp(f"call {mem} {name}(ptr {address}, i32 {size}, {bits} {lane_mask}, {mem} {other})")
    _from_memory(w, i, dtype, lanes, _reverse(w, mem, lanes, loaded) if reverse else loaded)


def _store(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, stream = arg
    _, dtype, lanes, _, _ = w.code[src[2]]
    address = address_of(w, src[0], src[1], offset)
    operand, mem, size = _to_memory(w, dtype, lanes, w.value[src[2]]), memory_type(dtype.name, lanes), dtype.itemsize
    if len(src) == 3:
        if stream:
            # lowering streams only at multiples of the vector, and runs this code only on buffers that are aligned (render.py)
            w.streams = True
            align = min(lanes * size, w.target.vector_bytes)
            w.lines.append(f"  store {mem} {operand}, ptr {address}, align {align}, !nontemporal !0")
        else:
            align = w.family.alignment(w, src[0], src[1], offset, lanes)
            w.lines.append(f"  store {mem} {operand}, ptr {address}, align {align}")
        return
    if w.family.branches:
        align = w.family.alignment(w, src[0], src[1], offset, lanes)
        _branched_store(w, dtype, lanes, _neighbours(w, dtype, address, lanes, 1), operand, src[3], align)
        return
    _masked_store(w, dtype, lanes, address, operand, src[3], reverse=False)


def _masked_store(w: Writer, dtype: DType, lanes: int, address: str, operand: str, mask: int, reverse: bool) -> None:
    """`operand`: of the memory type, already reversed where `reverse` says so; the mask counts lanes."""
    mem, size = memory_type(dtype.name, lanes), dtype.itemsize
    scalar_mask = w.code[mask].lanes == 1
    if scalar_mask and (lanes == 1 or not masks_in_hardware(w.target, size * 8)):
        w.lines.append(f"  store {mem} {operand}, ptr {_pick(w, w.value[mask], address, mem)}, align {size}")
        return
    lane_mask = _lane_mask(w, mask, lanes)
    constant = w.code[mask].arg if w.code[mask].op == "VCONST" else ()
    if sum(constant) == 1:
        # LLVM 22 turns a conversion to a narrower type and a masked store of one lane into a store of the wide element
        lane = lanes - 1 - constant.index(True) if reverse else constant.index(True)
        element = w.temp(f"extractelement {mem} {operand}, i64 {lane}")
        at = w.temp(f"getelementptr {_element(dtype)}, ptr {address}, i64 {lane}") if lane else address
        w.lines.append(f"  store {_element(dtype)} {element}, ptr {at}, align {size}")
        return
    if reverse and not scalar_mask:
        lane_mask = _reverse(w, f"<{lanes} x i1>", lanes, lane_mask)
    name = w.masked("store", _element(dtype), lanes)
    w.lines.append(f"  call void {name}({mem} {operand}, ptr {address}, i32 {size}, <{lanes} x i1> {lane_mask})")


# -- around branches --------------------------------------------------------------------------------
def _branched_load(w: Writer, i: int, dtype: DType, lanes: int, at: list[str], mask: int, alt: int, align: int) -> None:
    """One element per lane from the addresses `at`, where the mask holds. `align`: of the first one, where the others follow it; else 0."""
    mem, elem, size = memory_type(dtype.name, lanes), _element(dtype), dtype.itemsize
    other = _to_memory(w, dtype, lanes, w.value[alt])
    if w.code[mask].lanes == 1 and (align or lanes == 1):
        _from_memory(w, i, dtype, lanes, _where(w, w.value[mask], mem, other, lambda: f"load {mem}, ptr {at[0]}, align {align or size}"))
        return

    def by_lane() -> str:
        result = other
        for k, bit in enumerate(_mask_bits(w, mask, lanes)):
            if bit == "false":
                continue
            text = f"load {elem}, ptr {at[k]}, align {size}"
            if lanes == 1:
                return _where(w, bit, elem, other, lambda text=text: text)      # type: ignore[misc]
            before = w.temp(f"extractelement {mem} {other}, i64 {k}")
            one = w.temp(text) if bit == "true" else _where(w, bit, elem, before, lambda text=text: text)       # type: ignore[misc]
            result = w.temp(f"insertelement {mem} {result}, {elem} {one}, i64 {k}")
        return result
    if align > size and w.code[mask].op != "VCONST":
        whole = f"load {mem}, ptr {at[0]}, align {align}"
        _from_memory(w, i, dtype, lanes, _all_or_each(w, mask, lanes, mem, lambda: w.temp(whole), by_lane))
    else:
        _from_memory(w, i, dtype, lanes, by_lane())


def _branched_store(w: Writer, dtype: DType, lanes: int, at: list[str], operand: str, mask: int, align: int) -> None:
    """One element per lane to the addresses `at`, in the order of the lanes, where the mask holds. `operand`: of the memory type."""
    mem, elem, size = memory_type(dtype.name, lanes), _element(dtype), dtype.itemsize
    if w.code[mask].lanes == 1 and (align or lanes == 1):
        _only_where(w, w.value[mask], f"store {mem} {operand}, ptr {at[0]}, align {align or size}")
        return

    def by_lane() -> str:
        for k, bit in enumerate(_mask_bits(w, mask, lanes)):
            if bit != "false":
                one = w.temp(f"extractelement {mem} {operand}, i64 {k}") if lanes > 1 else operand
                _only_where(w, bit, f"store {elem} {one}, ptr {at[k]}, align {size}")
        return ""

    def at_once() -> str:
        w.lines.append(f"  store {mem} {operand}, ptr {at[0]}, align {align}")
        return ""
    if align > size and w.code[mask].op != "VCONST":
        _all_or_each(w, mask, lanes, "", at_once, by_lane)
    else:
        by_lane()


def _where(w: Writer, bit: str, mem: str, other: str, text: Callable[[], str]) -> str:
    """The value of the right-hand side `text` where `bit` holds, else `other`."""
    before, inside, after = w.block, w.fresh_label("some"), w.fresh_label("after")
    w.lines.append(f"  br i1 {bit}, label %{inside}, label %{after}")
    w.label(inside)
    value = w.temp(text())
    w.lines.append(f"  br label %{after}")
    w.label(after)
    return w.temp(f"phi {mem} [{value}, %{inside}], [{other}, %{before}]")


def _only_where(w: Writer, bit: str, text: str) -> None:
    """The statement `text` where `bit` holds."""
    if bit == "true":
        w.lines.append(f"  {text}")
        return
    inside, after = w.fresh_label("some"), w.fresh_label("after")
    w.lines.append(f"  br i1 {bit}, label %{inside}, label %{after}")
    w.label(inside)
    w.lines += [f"  {text}", f"  br label %{after}"]
    w.label(after)


def _all_or_each(w: Writer, mask: int, lanes: int, mem: str, at_once: Callable[[], str], by_lane: Callable[[], str]) -> str:
    """What `at_once` writes where the mask holds in all lanes, else what `by_lane` does; the value of the memory type `mem`, if any."""
    bits = _mask_bits(w, mask, lanes)
    every = bits[0]
    for bit in bits[1:]:
        every = w.temp(f"and i1 {every}, {bit}")
    whole, each, after = (w.fresh_label(kind) for kind in ("whole", "each", "after"))
    w.lines.append(f"  br i1 {every}, label %{whole}, label %{each}")
    w.label(whole)
    first = at_once()
    w.lines.append(f"  br label %{after}")
    w.label(each)
    second, last = by_lane(), w.block
    w.lines.append(f"  br label %{after}")
    w.label(after)
    return w.temp(f"phi {mem} [{first}, %{whole}], [{second}, %{last}]") if mem else ""


# -- ahead ------------------------------------------------------------------------------------------
def _prefetch(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """The line of an address into all caches, to be read. It may lie outside the buffer: no access, so nothing faults."""
    w.declared.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    w.lines.append(f"  call void @llvm.prefetch.p0(ptr {address_of(w, src[0], src[1], arg)}, i32 0, i32 3, i32 1)")


# -- strided ----------------------------------------------------------------------------------------
def _loads(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, stride = arg
    mem, size = memory_type(dtype.name, lanes), dtype.itemsize
    masked = len(src) == 4
    if lanes == 1 or stride == 1:
        _load(w, i, dtype, lanes, src, offset)
    elif stride == -1:
        address = address_of(w, src[0], src[1], offset - lanes + 1)
        if masked and w.family.branches:
            backwards = _neighbours(w, dtype, address, lanes, 1)[::-1]
            _branched_load(w, i, dtype, lanes, backwards, src[2], src[3], 0)
        elif masked:
            _masked_load(w, i, dtype, lanes, address, src[2], src[3], reverse=True)
        else:
            loaded = w.temp(f"load {mem}, ptr {address}, align {size}")
            _from_memory(w, i, dtype, lanes, _reverse(w, mem, lanes, loaded))
    elif not masked and stride == 0:
        one = w.temp(f"load {_element(dtype)}, ptr {address_of(w, src[0], src[1], offset)}, align {size}")
        _from_memory(w, i, dtype, lanes, w.broadcast(_element(dtype), lanes, one))
    elif not masked and abs(stride) <= w.family.widest_stride and lanes >= 4:
        _from_memory(w, i, dtype, lanes, _wide_load(w, dtype, lanes, src, offset, stride))
    elif 0 < abs(stride) <= w.family.widest_stride and lanes >= 4 and masks_in_hardware(w.target, size * 8):
        loaded, kept = _wide_load(w, dtype, lanes, src, offset, stride), _lane_mask(w, src[2], lanes)
        other = _to_memory(w, dtype, lanes, w.value[src[3]])
        _from_memory(w, i, dtype, lanes, w.temp(f"select <{lanes} x i1> {kept}, {mem} {loaded}, {mem} {other}"))
    else:
        _load_lanes(w, i, dtype, lanes, _neighbours(w, dtype, address_of(w, src[0], src[1], offset), lanes, stride), src)


def _wide_load(w: Writer, dtype: DType, lanes: int, src: tuple[int, ...], offset: int, stride: int) -> str:
    """A strided load as contiguous ones, the last moved back so that it ends at the last element asked for; under a mask, which goes where
    its lanes go, none is moved. They have a power of two lanes: LLVM shuffles vectors of other lengths element by element."""
    size, step = dtype.itemsize, abs(stride)
    span = (lanes - 1) * step + 1
    first = offset if stride > 0 else offset - (span - 1)
    wide = 1 << (lanes - 1).bit_length()        # of at least 4 lanes 2 elements apart: less than the span
    mem, count = memory_type(dtype.name, wide), -(-span // wide)
    position = [(k if stride > 0 else lanes - 1 - k) * step for k in range(lanes)]
    chunk_of = [p // wide for p in position]
    if len(src) == 2:
        starts = [min(c * wide, span - wide) for c in range(count)]
        chunks = [w.temp(f"load {mem}, ptr {address_of(w, src[0], src[1], first + s)}, align {size}") for s in starts]
    else:
        starts = [c * wide for c in range(count)]
        name, chunks = w.masked("load", _element(dtype), wide), []
        for s in starts:
            at, mask = address_of(w, src[0], src[1], first + s), _spread(w, src[2], lanes, wide, [p - s for p in position])
            chunks.append(w.temp(f"call {mem} {name}(ptr {at}, i32 {size}, <{wide} x i1> {mask}, {mem} poison)"))
    result = chunks[0]
    for c in range(1, count):
        # lanes of earlier chunks: from chunk 0 itself the first time, from their final place afterwards
        order = [f"i32 {wide + position[k] - starts[c]}" if chunk_of[k] == c else
                 f"i32 {position[k] if c == 1 else k}" if chunk_of[k] < c else "i32 poison" for k in range(lanes)]
        order += ["i32 poison"] * (wide - lanes)
        result = w.temp(f"shufflevector {mem} {result}, {mem} {chunks[c]}, <{wide} x i32> <{', '.join(order)}>")
    if wide == lanes:
        return result
    kept = ", ".join(f"i32 {k}" for k in range(lanes))
    return w.temp(f"shufflevector {mem} {result}, {mem} poison, <{lanes} x i32> <{kept}>")


def _spread(w: Writer, mask: int, lanes: int, wide: int, position: list[int]) -> str:
    """A mask of `wide` lanes that has lane k of `mask` at position[k], where that is one of them."""
    at = {p: k for k, p in enumerate(position)}
    if w.code[mask].op == "VCONST":
        bits = ", ".join(f"i1 {'true' if p in at and w.code[mask].arg[at[p]] else 'false'}" for p in range(wide))
        return f"<{bits}>"
    order = ", ".join(f"i32 {at.get(p, lanes)}" for p in range(wide))
    return w.temp(f"shufflevector <{lanes} x i1> {_lane_mask(w, mask, lanes)}, <{lanes} x i1> zeroinitializer, <{wide} x i32> <{order}>")


def _load_lanes(w: Writer, i: int, dtype: DType, lanes: int, at: list[str], src: tuple[int, ...]) -> None:
    """One scalar load per lane from the addresses `at`, masked where `src` has a mask."""
    mem, elem, size = memory_type(dtype.name, lanes), _element(dtype), dtype.itemsize
    masked = len(src) == 4
    if masked and w.family.branches:
        _branched_load(w, i, dtype, lanes, at, src[2], src[3], 0)
        return
    result = "poison"
    bits = _mask_bits(w, src[2], lanes) if masked else []
    for k in range(lanes):
        address = _pick(w, bits[k], at[k], elem) if masked else at[k]
        one = w.temp(f"load {elem}, ptr {address}, align {size}")
        result = w.temp(f"insertelement {mem} {result}, {elem} {one}, i64 {k}") if lanes > 1 else one
    _from_memory(w, i, dtype, lanes, result)
    if masked:
        reg, cond = register_type(dtype.name, lanes), register_type("bool", w.code[src[2]].lanes)
        w.value[i] = w.temp(f"select {cond} {w.value[src[2]]}, {reg} {w.value[i]}, {reg} {w.value[src[3]]}")


def _mask_bits(w: Writer, mask: int, lanes: int) -> list[str]:
    """The mask of each lane as an i1."""
    if w.code[mask].lanes == 1:
        return [w.value[mask]] * lanes
    if w.code[mask].op == "VCONST":
        return ["true" if bit else "false" for bit in w.code[mask].arg]
    return [w.temp(f"extractelement <{lanes} x i1> {w.value[mask]}, i64 {k}") for k in range(lanes)]


def _stores(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, stride = arg
    _, dtype, lanes, _, _ = w.code[src[2]]
    if lanes == 1 or stride == 1:
        _store(w, i, dtype, lanes, src, (offset, False))
        return
    operand, mem = _to_memory(w, dtype, lanes, w.value[src[2]]), memory_type(dtype.name, lanes)
    if stride == -1:
        address = address_of(w, src[0], src[1], offset - lanes + 1)
        operand = _reverse(w, mem, lanes, operand)
        if len(src) == 4 and w.family.branches:
            backwards = _neighbours(w, dtype, address, lanes, 1)[::-1]
            _branched_store(w, dtype, lanes, backwards, _reverse(w, mem, lanes, operand), src[3], 0)
        elif len(src) == 4:
            _masked_store(w, dtype, lanes, address, operand, src[3], reverse=True)
        else:
            w.lines.append(f"  store {mem} {operand}, ptr {address}, align {dtype.itemsize}")
        return
    _store_lanes(w, dtype, lanes, _neighbours(w, dtype, address_of(w, src[0], src[1], offset), lanes, stride), operand, src)


def _store_lanes(w: Writer, dtype: DType, lanes: int, at: list[str], operand: str, src: tuple[int, ...]) -> None:
    """One scalar store per lane to the addresses `at`, in lane order, masked where `src` has a mask."""
    mem, elem, size = memory_type(dtype.name, lanes), _element(dtype), dtype.itemsize
    masked = len(src) == 4
    if masked and w.family.branches:
        _branched_store(w, dtype, lanes, at, operand, src[3], 0)
        return
    bits = _mask_bits(w, src[3], lanes) if masked else []
    for k in range(lanes):
        address = _pick(w, bits[k], at[k], elem) if masked else at[k]
        one = w.temp(f"extractelement {mem} {operand}, i64 {k}") if lanes > 1 else operand
        w.lines.append(f"  store {elem} {one}, ptr {address}, align {size}")


# -- indexed ----------------------------------------------------------------------------------------
def _indices(w: Writer, idx: int) -> tuple[str, str]:
    """(type, operand) of an index vector as i64."""
    _, dtype, lanes, _, _ = w.code[idx]
    wide = register_type("index", lanes)
    if dtype.bits == 64:
        return wide, w.value[idx]
    if not dtype.is_int:
        raise refuse("GATHER", dtype, "the index must be an integer")
    return wide, w.temp(f"{'sext' if dtype.kind == 'i' else 'zext'} {register_type(dtype.name, lanes)} {w.value[idx]} to {wide}")


def _lane_addresses(w: Writer, ptr: int, idx: int, offset: int, lanes: int) -> list[str]:
    elem = _element(w.code[ptr].dtype)
    wide, operand = _indices(w, idx)
    base = w.value[ptr] if offset == 0 else w.temp(f"getelementptr {elem}, ptr {w.value[ptr]}, i64 {offset}")
    out = []
    for k in range(lanes):
        one = w.temp(f"extractelement {wide} {operand}, i64 {k}") if lanes > 1 else operand
        out.append(w.temp(f"getelementptr {elem}, ptr {base}, i64 {one}"))
    return out


def _vector_addresses(w: Writer, ptr: int, idx: int, offset: int, lanes: int) -> str:
    elem = _element(w.code[ptr].dtype)
    wide, operand = _indices(w, idx)
    base = w.value[ptr] if offset == 0 else w.temp(f"getelementptr {elem}, ptr {w.value[ptr]}, i64 {offset}")
    return w.temp(f"getelementptr {elem}, ptr {base}, {wide} {operand}")


def _gather(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    if lanes == 1 or not gathers_in_hardware(w.target, dtype.itemsize * 8):
        _load_lanes(w, i, dtype, lanes, _lane_addresses(w, src[0], src[1], arg, lanes), src)
        return
    mem, size, bits = memory_type(dtype.name, lanes), dtype.itemsize, f"<{lanes} x i1>"
    mask, alt = (_lane_mask(w, src[2], lanes), w.value[src[3]]) if len(src) == 4 else ("splat (i1 true)", "poison")
    at = _vector_addresses(w, src[0], src[1], arg, lanes)
    name = w.masked("gather", _element(dtype), lanes)
    _from_memory(w, i, dtype, lanes, w.temp(f"call {mem} {name}(<{lanes} x ptr> {at}, i32 {size}, {bits} {mask}, {mem} {alt})"))


def _scatter(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _, dtype, lanes, _, _ = w.code[src[2]]
    operand, mem, size = _to_memory(w, dtype, lanes, w.value[src[2]]), memory_type(dtype.name, lanes), dtype.itemsize
    if lanes == 1 or not gathers_in_hardware(w.target, size * 8):
        _store_lanes(w, dtype, lanes, _lane_addresses(w, src[0], src[1], arg, lanes), operand, src)
        return
    mask = _lane_mask(w, src[3], lanes) if len(src) == 4 else "splat (i1 true)"
    at = _vector_addresses(w, src[0], src[1], arg, lanes)
    name = w.masked("scatter", _element(dtype), lanes)
    w.lines.append(f"  call void {name}({mem} {operand}, <{lanes} x ptr> {at}, i32 {size}, <{lanes} x i1> {mask})")


Handler = Callable[[Writer, int, DType, int, tuple[int, ...], Any], None]
HANDLERS: dict[str, Handler] = {
    "ARG": _arg, "TEMP": _temp, "SCRATCH": _scratch, "VAR": _var, "LOAD": _load, "STORE": _store, "LOADS": _loads, "STORES": _stores,
    "GATHER": _gather, "SCATTER": _scatter, "PREFETCH": _prefetch,
}
