"""Memory instructions of LINEAR as LLVM text: pointers, contiguous, strided and indexed accesses, all with masks.

An access whose mask is false must not touch memory. How that is done:

    mask               contiguous                                 strided, indexed
    per lane           llvm.masked.load/store                     lane by lane, each with a scalar mask
    scalar             the address is replaced by that of a private stack slot: no branch, so basic blocks stay large. A contiguous store of
                       a vector is a masked store with the mask in all lanes, if the target has it as one instruction
    scalar and lanes   a load of numbers with a constant alternative value: the address as for the scalar, under the mask of the lanes. If
                       that is constant, no mask is computed. With the address of the slot no lane touches an unmapped page
    any, one address   loaded once for all lanes if the mask is true in any of them, with a scalar mask as above
    any, on a GPU      a branch around the access, which becomes a predicate: lane by lane, or once for the vector if all lanes' masks
                       are true

A strided load with a small stride loads complete vectors between its first and its last lane, never beyond, and shuffles them. Other
strided and all indexed accesses go lane by lane, or use gather and scatter instructions if `gathers_in_hardware` is true.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from svod.compile.llvm.text import LlvmWriter, memory_type, refuse, register_type, splat
from svod.core.ir.dtype import DType
from svod.core.machine.target import Target

# bytes; masked loads whose addresses differ by at most this much share one choice of an address. A slot on the stack is that much longer
# than a load: windows of most rows of images fit, and eight stores fill it
NEAR_BYTES = 512


def gathers_in_hardware(target: Target, bits: int) -> bool:
    """Whether to use gather and scatter instructions for elements of `bits` bits: with AVX-512. On Zen 5 a gather of 16 float32 takes 4.0
    ns, and lane by lane it takes 4.6 ns and more instructions. AVX2 has gathers without mask registers, which are not used."""
    return "avx512f" in target.features and bits >= 32


def masks_in_hardware(target: Target, bits: int) -> bool:
    """Whether a masked vector access of `bits`-wide elements is one instruction."""
    if not target.has_masked_memory:
        return False
    return bits >= 32 or "avx512f" in target.features or target.arch != "x86_64"


def _element(dtype: DType) -> str:
    return memory_type(dtype.name, 1)


def address_of(w: LlvmWriter, ptr: int, idx: int, offset: int) -> str:
    """Compute the address `ptr[idx + offset]`, with the offset as a separate constant that addressing modes can include.

    Not `inbounds`: the base of a masked or padded access may lie outside the buffer."""
    index = w.code[idx]
    if index.op == "CONST":
        return _moved(w, ptr, w.value[ptr], offset + index.arg)
    base = w.scope.addresses.get((ptr, idx))
    if base is None:
        operand = _as_index(w, idx)
        base = w.scope.addresses[ptr, idx] = w.temp(f"getelementptr {_element(w.code[ptr].dtype)}, ptr {w.value[ptr]}, i64 {operand}")
    return _moved(w, ptr, base, offset)


def _moved(w: LlvmWriter, ptr: int, base: str, offset: int) -> str:
    """Compute the address `offset` elements after a pointer."""
    return base if offset == 0 else w.temp(f"getelementptr {_element(w.code[ptr].dtype)}, ptr {base}, i64 {offset}")


def _as_index(w: LlvmWriter, idx: int) -> str:
    """Convert an index, or a vector of them, to i64."""
    _, dtype, lanes, _, _ = w.code[idx]
    if dtype.bits == 64:
        return w.value[idx]
    if not dtype.is_int:
        raise refuse("GATHER", dtype, "the index must be an integer")
    extend = "sext" if dtype.kind == "i" else "zext"
    return w.temp(f"{extend} {register_type(dtype.name, lanes)} {w.value[idx]} to {register_type('index', lanes)}")


def _arg(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    slot = arg + (w.temp_base if w.code[i].op == "TEMP" else 0)
    w.define(i, f"load ptr, ptr {w.temp(f'getelementptr ptr, ptr %args, i64 {slot}')}, align 8")


def _scratch(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.define(i, f"getelementptr i8, ptr %scratch, i64 {arg}")


def _var(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.define(i, f"load i64, ptr {w.temp(f'getelementptr i64, ptr %vars, i64 {w.variables[arg]}')}, align 8")


def _from_memory(w: LlvmWriter, i: int, dtype: DType, lanes: int, loaded: str) -> None:
    """Make `loaded`, of the memory type, the value of instruction i."""
    if dtype.kind == "b":
        loaded = w.temp(f"icmp ne {memory_type('bool', lanes)} {loaded}, {'0' if lanes == 1 else 'zeroinitializer'}")
    w.value[i] = loaded


def _to_memory(w: LlvmWriter, dtype: DType, lanes: int, operand: str) -> str:
    if dtype.kind == "b":
        return w.temp(f"zext {register_type('bool', lanes)} {operand} to {memory_type('bool', lanes)}")
    return operand


def _select(w: LlvmWriter, i: int, dtype: DType, lanes: int, condition: str, mask: str, alt: int) -> None:
    """Replace the value of instruction i by `alt` in lanes where a mask of the type `condition` is false."""
    reg = register_type(dtype.name, lanes)
    w.value[i] = w.temp(f"select {condition} {mask}, {reg} {w.value[i]}, {reg} {w.value[alt]}")


def _pick(w: LlvmWriter, mask: str, address: str, mem: str, content: str = "poison") -> str:
    """Select `address` if the scalar mask is true, otherwise a slot of the memory type `mem` that holds the constant `content`."""
    return w.temp(f"select i1 {mask}, ptr {address}, ptr {w.slot(mem, content)}")


def _pick_elements(w: LlvmWriter, mask: str, src: tuple[int, ...], offset: int, lanes: int, fill: int) -> str:
    """Return the address of `lanes` elements at `ptr[idx + offset]` if the scalar mask is true, otherwise of as many elements with the
    constant value of instruction `fill`. Loads near each other under one mask share the choice."""
    ptr, idx = src[:2]
    dtype, near, key = w.code[ptr].dtype, NEAR_BYTES // w.code[ptr].dtype.itemsize, (ptr, idx, mask, lanes, w.value[fill])
    first, picked = w.scope.picked.get(key, (offset, ""))
    if not picked or not first <= offset <= first + near:
        content = splat(dtype, w.code[fill].arg, near + lanes)
        first, picked = offset, _pick(w, mask, address_of(w, ptr, idx, offset), memory_type(dtype.name, near + lanes), content)
        w.scope.picked[key] = first, picked
    return _moved(w, ptr, picked, offset - first)


def _lane_mask(w: LlvmWriter, mask: int, lanes: int) -> str:
    """Return a mask as an operand with an i1 for each of `lanes` lanes; a scalar mask is broadcast."""
    return w.value[mask] if w.code[mask].lanes == lanes else w.broadcast("i1", lanes, w.value[mask])


def _mask_bits(w: LlvmWriter, mask: int, lanes: int) -> list[str]:
    """Return the mask of each lane as an i1."""
    if w.code[mask].lanes == 1:
        return [w.value[mask]] * lanes
    if w.code[mask].op == "VCONST":
        return ["true" if bit else "false" for bit in w.code[mask].arg]
    return [w.temp(f"extractelement <{lanes} x i1> {w.value[mask]}, i64 {k}") for k in range(lanes)]


def _scalar_of(w: LlvmWriter, mask: int) -> str | None:
    """Return the scalar mask if all lanes share one, or None for a per-lane mask."""
    if w.code[mask].op == "SPLAT":
        return w.value[w.code[mask].src[0]]
    return w.value[mask] if w.code[mask].lanes == 1 else None


class _Conjunction(NamedTuple):
    """A mask of a load as a conjunction of a scalar, constants of lanes, and a vector that is neither; None: there is no such part."""

    scalar: str | None
    lanes: tuple[bool, ...]
    vector: str | None

    @property
    def is_known(self) -> bool:
        """Whether the mask of lanes is constant."""
        return self.vector is None


def _conjunction(w: LlvmWriter, dtype: DType, lanes: int, src: tuple[int, ...]) -> _Conjunction | None:
    """Take the mask of a load of numbers with a constant alternative value apart; None for other loads."""
    return _parts(w, src[2], lanes) if w.code[src[3]].op == "CONST" and dtype.kind != "b" else None


def _parts(w: LlvmWriter, mask: int, lanes: int) -> _Conjunction:
    found = w.scope.conjunctions.get((mask, lanes))
    if found is None:
        found = w.scope.conjunctions[mask, lanes] = _take_apart(w, mask, lanes)
    return found


def _take_apart(w: LlvmWriter, mask: int, lanes: int) -> _Conjunction:
    op, _, own, src, arg = w.code[mask]
    every = (True,) * lanes
    if own == 1 or op == "SPLAT":
        return _Conjunction(w.value[mask] if own == 1 else w.value[src[0]], every, None)
    if op == "VCONST" or op == "CONST":
        return _Conjunction(None, tuple(arg) if op == "VCONST" else (arg,) * lanes, None)
    if op != "AND":
        return _Conjunction(None, every, w.value[mask])
    a, b = (_parts(w, s, lanes) for s in src)
    if a.scalar is None and b.scalar is None and not (a.is_known and b.is_known):
        return _Conjunction(None, every, w.value[mask])
    return _Conjunction(_both(w, "i1", a.scalar, b.scalar), tuple([x and y for x, y in zip(a.lanes, b.lanes, strict=True)]),
                        _both(w, f"<{lanes} x i1>", a.vector, b.vector))


def _both(w: LlvmWriter, kind: str, a: str | None, b: str | None) -> str | None:
    """Return the conjunction of two masks of an LLVM type, each of which may be missing."""
    parts = list(dict.fromkeys(x for x in (a, b) if x is not None))
    return w.temp(f"and {kind} {', '.join(parts)}") if len(parts) == 2 else parts[0] if parts else None


def _lanes_of(w: LlvmWriter, mask: _Conjunction) -> str:
    """Return the mask of lanes, without the scalar."""
    constant = None if all(mask.lanes) and mask.vector is not None else _constant_mask(mask.lanes)
    return _both(w, f"<{len(mask.lanes)} x i1>", mask.vector, constant) or _constant_mask(mask.lanes)


def _reverse(w: LlvmWriter, vec: str, lanes: int, operand: str) -> str:
    order = ", ".join(f"i32 {k}" for k in range(lanes - 1, -1, -1))
    return w.temp(f"shufflevector {vec} {operand}, {vec} poison, <{lanes} x i32> <{order}>")


def _neighbours(w: LlvmWriter, dtype: DType, address: str, lanes: int, stride: int) -> list[str]:
    """Compute the addresses of lanes that are `stride` elements apart."""
    elem = _element(dtype)
    return [address if k == 0 else w.temp(f"getelementptr {elem}, ptr {address}, i64 {k * stride}") for k in range(lanes)]


# -- contiguous -------------------------------------------------------------------------------------
def _load(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    align = w.family.alignment(w, src[0], src[1], arg, lanes)
    if len(src) == 2:
        text = f"load {memory_type(dtype.name, lanes)}, ptr {address_of(w, src[0], src[1], arg)}, align {align}"
        if dtype.kind == "b":
            _from_memory(w, i, dtype, lanes, w.temp(text))
        else:
            w.define(i, text)
    elif w.family.branches:
        _branched_load(w, i, dtype, lanes, _neighbours(w, dtype, address_of(w, src[0], src[1], arg), lanes, 1), src[2], src[3], align)
    else:
        _masked_load(w, i, dtype, lanes, src, arg, reverse=False)


def _masked_load(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], offset: int, reverse: bool) -> None:
    """Load `lanes` contiguous elements; `reverse`: lane 0 is the last of them (the mask and the alternative value count lanes).

    A scalar mask selects the address. A masked load instruction would take hundreds of cycles on an unmapped page, and the address may be
    invalid if the mask is false. A constant alternative value is stored in the slot, so no select follows the load, and LLVM can fold the
    load into the instruction that uses it."""
    mem, align, bits = memory_type(dtype.name, lanes), w.family.element_alignment(w, src[0]), f"<{lanes} x i1>"
    parts, of_all = _conjunction(w, dtype, lanes, src), _scalar_of(w, src[2])
    if parts is not None and parts.scalar is not None:
        address = _pick_elements(w, parts.scalar, src, offset, lanes, src[3])
    else:
        address = address_of(w, src[0], src[1], offset)
        if of_all is not None:
            address = _pick(w, of_all, address, mem)
    if of_all is not None:
        loaded = w.temp(f"load {mem}, ptr {address}, align {align}")
    else:
        mask = _lane_mask(w, src[2], lanes) if parts is None else _lanes_of(w, parts)
        other = _to_memory(w, dtype, lanes, w.value[src[3]])
        if reverse:
            mask, other = _reverse(w, bits, lanes, mask), _reverse(w, mem, lanes, other)
        loaded = w.masked("load", _element(dtype), lanes, ("ptr", address), ("i32", str(align)), (bits, mask), (mem, other))
    _from_memory(w, i, dtype, lanes, _reverse(w, mem, lanes, loaded) if reverse else loaded)
    if of_all is not None and parts is None:
        _select(w, i, dtype, lanes, "i1", of_all, src[3])


def _store(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, stream = arg
    _, dtype, lanes, _, _ = w.code[src[2]]
    address, align = address_of(w, src[0], src[1], offset), w.family.alignment(w, src[0], src[1], offset, lanes)
    operand, mem = _to_memory(w, dtype, lanes, w.value[src[2]]), memory_type(dtype.name, lanes)
    if len(src) == 3:
        hint = ""
        if stream:
            # lowering emits streaming stores only at multiples of the vector, and this code runs only on aligned buffers (render.py)
            w.streams, align, hint = True, min(lanes * dtype.itemsize, w.target.vector_bytes), ", !nontemporal !0"
        w.lines.append(f"  store {mem} {operand}, ptr {address}, align {align}{hint}")
    elif w.family.branches:
        _branched_store(w, dtype, lanes, _neighbours(w, dtype, address, lanes, 1), operand, src[3], align)
    else:
        _masked_store(w, dtype, lanes, address, operand, src[3], reverse=False)


def _masked_store(w: LlvmWriter, dtype: DType, lanes: int, address: str, operand: str, mask: int, reverse: bool) -> None:
    """Store contiguous elements. `operand` has the memory type and is already reversed if `reverse`; the mask counts lanes."""
    mem, size = memory_type(dtype.name, lanes), dtype.itemsize
    scalar_mask = w.code[mask].lanes == 1
    if scalar_mask and (lanes == 1 or not masks_in_hardware(w.target, size * 8)):
        w.lines.append(f"  store {mem} {operand}, ptr {_pick(w, w.value[mask], address, mem)}, align {size}")
        return
    lane_mask = _lane_mask(w, mask, lanes)
    constant = w.code[mask].arg if w.code[mask].op == "VCONST" else ()
    if sum(constant) == 1:
        # LLVM 22 miscompiles a narrowing conversion followed by a masked store of one lane: it stores the wide element
        lane = lanes - 1 - constant.index(True) if reverse else constant.index(True)
        element = w.temp(f"extractelement {mem} {operand}, i64 {lane}")
        at = w.temp(f"getelementptr {_element(dtype)}, ptr {address}, i64 {lane}") if lane else address
        w.lines.append(f"  store {_element(dtype)} {element}, ptr {at}, align {size}")
        return
    bits = f"<{lanes} x i1>"
    if reverse and not scalar_mask:
        lane_mask = _reverse(w, bits, lanes, lane_mask)
    w.masked("store", _element(dtype), lanes, (mem, operand), ("ptr", address), ("i32", str(size)), (bits, lane_mask))


# -- around branches --------------------------------------------------------------------------------
def _branched_load(w: LlvmWriter, i: int, dtype: DType, lanes: int, at: list[str], mask: int, alt: int, align: int) -> None:
    """Load one element per lane from the addresses `at` if the mask is true. `align`: the alignment of the first address if the others
    follow it contiguously; otherwise 0."""
    mem, elem, size = memory_type(dtype.name, lanes), _element(dtype), dtype.itemsize
    other = _to_memory(w, dtype, lanes, w.value[alt])
    whole = partial(w.temp, f"load {mem}, ptr {at[0]}, align {align or size}")

    def by_lane() -> str:
        result = other
        for k, bit in enumerate(_mask_bits(w, mask, lanes)):
            if bit != "false":
                one = partial(w.temp, f"load {elem}, ptr {at[k]}, align {size}")
                before = w.temp(f"extractelement {mem} {other}, i64 {k}")
                loaded = one() if bit == "true" else w.either(bit, one, mem=elem, otherwise=before)
                result = w.temp(f"insertelement {mem} {result}, {elem} {loaded}, i64 {k}")
        return result
    if w.code[mask].lanes == 1 and (align or lanes == 1):
        loaded = w.either(w.value[mask], whole, mem=mem, otherwise=other)
    elif align > size and w.code[mask].op != "VCONST":
        loaded = w.either(_all_hold(w, mask, lanes), whole, by_lane, mem)
    else:
        loaded = by_lane()
    _from_memory(w, i, dtype, lanes, loaded)


def _branched_store(w: LlvmWriter, dtype: DType, lanes: int, at: list[str], operand: str, mask: int, align: int) -> None:
    """Store one element per lane to the addresses `at`, in lane order, if the mask is true. `operand` has the memory type."""
    mem, elem, size = memory_type(dtype.name, lanes), _element(dtype), dtype.itemsize
    whole = partial(w.line, f"store {mem} {operand}, ptr {at[0]}, align {align or size}")

    def by_lane() -> str:
        for k, bit in enumerate(_mask_bits(w, mask, lanes)):
            if bit != "false":
                one = w.temp(f"extractelement {mem} {operand}, i64 {k}")
                store = partial(w.line, f"store {elem} {one}, ptr {at[k]}, align {size}")
                store() if bit == "true" else w.either(bit, store)
        return ""
    if w.code[mask].lanes == 1 and (align or lanes == 1):
        w.either(w.value[mask], whole)
    elif align > size and w.code[mask].op != "VCONST":
        w.either(_all_hold(w, mask, lanes), whole, by_lane)
    else:
        by_lane()


def _all_hold(w: LlvmWriter, mask: int, lanes: int) -> str:
    """Compute whether a mask is true in all lanes, as an i1."""
    return reduce(lambda every, bit: w.temp(f"and i1 {every}, {bit}"), _mask_bits(w, mask, lanes))


def _any_holds(w: LlvmWriter, mask: int, lanes: int) -> str:
    """Compute whether a mask is true in any lane, as an i1."""
    of_all = _scalar_of(w, mask)
    if of_all is not None:
        return of_all
    bits = w.temp(f"bitcast <{lanes} x i1> {w.value[mask]} to i{lanes}")
    return w.temp(f"icmp ne i{lanes} {bits}, 0")


# -- prefetches --------------------------------------------------------------------------------
def _prefetch(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """Prefetch the cache line of an address for reading, into all caches. The address may be outside the buffer: a prefetch never
    faults."""
    w.call("void", "llvm.prefetch.p0", ("ptr", address_of(w, src[0], src[1], arg)), ("i32", "0"), ("i32", "3"), ("i32", "1"))


# -- strided ----------------------------------------------------------------------------------------
def _loads(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, stride = arg
    mem, size = memory_type(dtype.name, lanes), dtype.itemsize
    masked = len(src) == 4
    if lanes == 1 or stride == 1:
        _load(w, i, dtype, lanes, src, offset)
    elif stride == -1 and not (masked and w.family.branches):
        if masked:
            _masked_load(w, i, dtype, lanes, src, offset - lanes + 1, reverse=True)
        else:
            loaded = w.temp(f"load {mem}, ptr {address_of(w, src[0], src[1], offset - lanes + 1)}, "
                            f"align {w.family.element_alignment(w, src[0])}")
            _from_memory(w, i, dtype, lanes, _reverse(w, mem, lanes, loaded))
    elif stride == 0:
        _shared_load(w, i, dtype, lanes, address_of(w, src[0], src[1], offset), src)
    elif lanes >= 4 and 0 < abs(stride) <= w.family.widest_stride and (not masked or masks_in_hardware(w.target, size * 8)):
        parts = _conjunction(w, dtype, lanes, src) if masked else None
        loaded = _wide_load(w, dtype, lanes, src, offset, stride, parts)
        if masked and (parts is None or not parts.is_known):
            on, other = _lane_mask(w, src[2], lanes), _to_memory(w, dtype, lanes, w.value[src[3]])
            loaded = w.temp(f"select <{lanes} x i1> {on}, {mem} {loaded}, {mem} {other}")
        _from_memory(w, i, dtype, lanes, loaded)
    else:
        _load_lanes(w, i, dtype, lanes, _neighbours(w, dtype, address_of(w, src[0], src[1], offset), lanes, stride), src)


def _shared_load(w: LlvmWriter, i: int, dtype: DType, lanes: int, address: str, src: tuple[int, ...]) -> None:
    """Load one element for all lanes; under a mask, if it is true in any of them."""
    elem = _element(dtype)

    def load(at: str) -> str:
        return w.temp(f"load {elem}, ptr {at}, align {w.family.element_alignment(w, src[0])}")
    if len(src) == 2:
        _from_memory(w, i, dtype, lanes, w.broadcast(elem, lanes, load(address)))
        return
    wanted = _any_holds(w, src[2], lanes)
    if w.family.branches:
        one = w.either(wanted, partial(load, address), mem=elem, otherwise="poison")
    else:
        one = load(_pick(w, wanted, address, elem))
    _from_memory(w, i, dtype, lanes, w.broadcast(elem, lanes, one))
    _select(w, i, dtype, lanes, register_type("bool", w.code[src[2]].lanes), w.value[src[2]], src[3])


def _wide_load(w: LlvmWriter, dtype: DType, lanes: int, src: tuple[int, ...], offset: int, stride: int,
               parts: _Conjunction | None) -> str:
    """Write a strided load as contiguous loads and shuffles. The loads have a power of two lanes, because LLVM shuffles vectors of other
    lengths element by element. `parts`: the mask, if the alternative value is constant. If its lanes are known, those that are not loaded
    have that value."""
    step = abs(stride)
    span = (lanes - 1) * step + 1
    wide = 1 << (lanes - 1).bit_length()        # lanes of each load: fewer than the span, which is at least 7 elements for 4 lanes
    mem = memory_type(dtype.name, wide)
    position = [(k if stride > 0 else lanes - 1 - k) * step for k in range(lanes)]
    chunk_of = [p // wide for p in position]
    starts, chunks = _chunks(w, dtype, wide, src, offset if stride > 0 else offset - (span - 1), position, parts)
    result = chunks[0]
    for c in range(1, len(chunks)):
        # lanes of earlier chunks come from chunk 0 in the first iteration, afterwards from their final position in `result`
        order = [f"i32 {wide + position[k] - starts[c]}" if chunk_of[k] == c else
                 f"i32 {position[k] if c == 1 else k}" if chunk_of[k] < c else "i32 poison" for k in range(lanes)]
        order += ["i32 poison"] * (wide - lanes)
        result = w.temp(f"shufflevector {mem} {result}, {mem} {chunks[c]}, <{wide} x i32> <{', '.join(order)}>")
    if wide == lanes:
        return result
    kept = ", ".join(f"i32 {k}" for k in range(lanes))
    return w.temp(f"shufflevector {mem} {result}, {mem} poison, <{lanes} x i32> <{kept}>")


def _chunks(w: LlvmWriter, dtype: DType, wide: int, src: tuple[int, ...], first: int, position: list[int],
            parts: _Conjunction | None) -> tuple[list[int], list[str]]:
    """Write the contiguous loads of a strided load, whose lanes are at `position` after the offset `first`; returns starts and values.
    Without a mask of lanes the last load begins earlier, so that it ends at the last element needed. With one it does not, because the mask
    is false for elements beyond the last one."""
    mem, align, lanes, span = memory_type(dtype.name, wide), w.family.element_alignment(w, src[0]), len(position), max(position) + 1
    known = parts.lanes if parts is not None and parts.is_known else None

    def address(start: int) -> str:
        if parts is None or parts.scalar is None:
            return address_of(w, src[0], src[1], first + start)
        return _pick_elements(w, parts.scalar, src, first + start, wide, src[3])
    if len(src) == 2 or (known is not None and all(known)):
        starts = [min(s, span - wide) for s in range(0, span, wide)]
        return starts, [w.temp(f"load {mem}, ptr {address(s)}, align {align}") for s in starts]
    starts = list(range(0, span, wide))
    if known is None:
        mask = _lane_mask(w, src[2], lanes) if parts is None else _lanes_of(w, parts)
        masks = [_spread(w, mask, lanes, wide, [p - s for p in position]) for s in starts]
        other = "poison"
    else:
        masks = [_spread_constant(known, wide, [p - s for p in position]) for s in starts]
        other = splat(dtype, w.code[src[3]].arg, wide)
    bits = f"<{wide} x i1>"
    return starts, [w.masked("load", _element(dtype), wide, ("ptr", address(s)), ("i32", str(align)), (bits, mask), (mem, other))
                    for s, mask in zip(starts, masks, strict=True)]


def _spread(w: LlvmWriter, mask: str, lanes: int, wide: int, position: list[int]) -> str:
    """Make a mask of `wide` lanes. Lane position[k] is lane k of `mask`, if that is less than `wide`; all other lanes are false."""
    at = {p: k for k, p in enumerate(position)}
    order = ", ".join(f"i32 {at.get(p, lanes)}" for p in range(wide))
    return w.temp(f"shufflevector <{lanes} x i1> {mask}, <{lanes} x i1> zeroinitializer, <{wide} x i32> <{order}>")


def _spread_constant(lanes: Sequence[bool], wide: int, position: list[int]) -> str:
    """`_spread` of a constant mask."""
    held = {p for p, bit in zip(position, lanes, strict=True) if bit}
    return _constant_mask([p in held for p in range(wide)])


def _constant_mask(lanes: Sequence[bool]) -> str:
    return f"<{', '.join(f'i1 {str(bit).lower()}' for bit in lanes)}>"


def _load_lanes(w: LlvmWriter, i: int, dtype: DType, lanes: int, at: list[str], src: tuple[int, ...]) -> None:
    """Do one scalar load per lane from the addresses `at`, masked if `src` has a mask."""
    elem, align, masked = _element(dtype), w.family.element_alignment(w, src[0]), len(src) == 4
    if masked and w.family.branches:
        _branched_load(w, i, dtype, lanes, at, src[2], src[3], 0)
        return
    places = (_pick(w, bit, p, elem) for bit, p in zip(_mask_bits(w, src[2], lanes), at, strict=True)) if masked else at
    _from_memory(w, i, dtype, lanes, w.vector(elem, lanes, (w.temp(f"load {elem}, ptr {p}, align {align}") for p in places)))
    if masked:
        _select(w, i, dtype, lanes, register_type("bool", w.code[src[2]].lanes), w.value[src[2]], src[3])


def _stores(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    offset, stride = arg
    _, dtype, lanes, _, _ = w.code[src[2]]
    masked = len(src) == 4
    if lanes == 1 or stride == 1:
        _store(w, i, dtype, lanes, src, (offset, False))
        return
    operand, mem = _to_memory(w, dtype, lanes, w.value[src[2]]), memory_type(dtype.name, lanes)
    if stride == -1 and not (masked and w.family.branches):
        address, operand = address_of(w, src[0], src[1], offset - lanes + 1), _reverse(w, mem, lanes, operand)
        if masked:
            _masked_store(w, dtype, lanes, address, operand, src[3], reverse=True)
        else:
            w.lines.append(f"  store {mem} {operand}, ptr {address}, align {dtype.itemsize}")
        return
    _store_lanes(w, dtype, lanes, _neighbours(w, dtype, address_of(w, src[0], src[1], offset), lanes, stride), operand, src)


def _store_lanes(w: LlvmWriter, dtype: DType, lanes: int, at: list[str], operand: str, src: tuple[int, ...]) -> None:
    """Do one scalar store per lane to the addresses `at`, in lane order, masked if `src` has a mask."""
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
def _lane_addresses(w: LlvmWriter, ptr: int, idx: int, offset: int, lanes: int) -> list[str]:
    elem, operand = _element(w.code[ptr].dtype), _as_index(w, idx)
    base, places = _moved(w, ptr, w.value[ptr], offset), []
    for k in range(lanes):
        one = w.temp(f"extractelement <{lanes} x i64> {operand}, i64 {k}") if lanes > 1 else operand
        places.append(w.temp(f"getelementptr {elem}, ptr {base}, i64 {one}"))
    return places


def _vector_addresses(w: LlvmWriter, ptr: int, idx: int, offset: int, lanes: int) -> tuple[str, str]:
    """Compute the addresses of all lanes, as an operand with its type."""
    operand = _as_index(w, idx)
    base = _moved(w, ptr, w.value[ptr], offset)
    return f"<{lanes} x ptr>", w.temp(f"getelementptr {_element(w.code[ptr].dtype)}, ptr {base}, <{lanes} x i64> {operand}")


def _gather(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    if lanes == 1 or not gathers_in_hardware(w.target, dtype.itemsize * 8):
        _load_lanes(w, i, dtype, lanes, _lane_addresses(w, src[0], src[1], arg, lanes), src)
        return
    mem, bits = memory_type(dtype.name, lanes), f"<{lanes} x i1>"
    mask, alt = (_lane_mask(w, src[2], lanes), w.value[src[3]]) if len(src) == 4 else ("splat (i1 true)", "poison")
    at, align = _vector_addresses(w, src[0], src[1], arg, lanes), w.family.element_alignment(w, src[0])
    _from_memory(w, i, dtype, lanes, w.masked("gather", _element(dtype), lanes, at, ("i32", str(align)), (bits, mask), (mem, alt)))


def _scatter(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    _, dtype, lanes, _, _ = w.code[src[2]]
    operand, mem, size = _to_memory(w, dtype, lanes, w.value[src[2]]), memory_type(dtype.name, lanes), dtype.itemsize
    if lanes == 1 or not gathers_in_hardware(w.target, size * 8):
        _store_lanes(w, dtype, lanes, _lane_addresses(w, src[0], src[1], arg, lanes), operand, src)
        return
    mask = _lane_mask(w, src[3], lanes) if len(src) == 4 else "splat (i1 true)"
    at = _vector_addresses(w, src[0], src[1], arg, lanes)
    w.masked("scatter", _element(dtype), lanes, (mem, operand), at, ("i32", str(size)), (f"<{lanes} x i1>", mask))


Handler = Callable[[LlvmWriter, int, DType, int, tuple[int, ...], Any], None]
HANDLERS: dict[str, Handler] = {
    "ARG": _arg, "TEMP": _arg, "SCRATCH": _scratch, "VAR": _var, "LOAD": _load, "STORE": _store, "LOADS": _loads, "STORES": _stores,
    "GATHER": _gather, "SCATTER": _scatter, "PREFETCH": _prefetch,
}
