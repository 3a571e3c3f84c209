"""Loads and stores as WGSL: the types of the arrays behind pointers, and the code that reads and writes their elements.

    float32, int32, uint32, 64 bits     array<T>; array<vec4<T>> if all stores and some loads are of complete vectors
    float16 with the feature float16    array<f16>, or array<vec4<f16>> under the same condition
    other types                         array<u32> with several elements in a word. An access that is known to cover complete words reads or
                                        writes these; otherwise a word is read for each element, and an element is written by two atomic
                                        operations that leave the other elements of the word unchanged
    scratch and shared memory           array<T> with the type of registers, in which narrow elements take 32 bits
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from svod.compile.lower.linear import LOADS_OPS, STORE_OPS
from svod.compile.webgpu.alu import bits_of, from_bits, gathered
from svod.compile.webgpu.text import CHUNK_LANES, COMPONENTS, REGISTER_TYPES, WgslWriter, lane, register, vector, widths
from svod.core.ir.dtype import DType

GLOBAL = ("ARG", "TEMP")


class PointerMemory:
    """The memory that pointers of a phase point to: a variable of the module, and the layout of its elements."""

    def __init__(self, w: WgslWriter, op: str, number: int, dtype: DType) -> None:
        self.w, self.op, self.number, self.dtype = w, op, number, dtype
        self.name = f"{op.lower()}{number}"
        self.base = w.launch_number(2 + len(w.spec.variables) + number) if op == "ARG" and not w.aligned else ""
        self.whole: bool = w.aligned or op != "ARG"     # whether the memory begins at a multiple of 16 bytes
        self.scalar_stores = self.vector_accesses = self.stored = self.accessed = self.loose = False
        # scalar loads, counted by the vector of four elements that contains them: (index, offset)
        self.parts: Counter[tuple[int, int]] = Counter()
        self.is_half = dtype.name == "float16" and w.has("float16")
        self.is_packed = op in GLOBAL and dtype.itemsize < 4 and not self.is_half

    @property
    def per_word(self) -> int:
        """The number of elements in a word, if elements are packed."""
        return 4 // self.dtype.itemsize

    @property
    def word_shift(self) -> int:
        """The shift that turns an element's number into its word's number."""
        return self.per_word.bit_length() - 1

    @property
    def is_vectors(self) -> bool:
        """Whether the variable is an array of vectors of four elements."""
        if self.op not in GLOBAL or self.is_packed or self.dtype.bits == 64 or self.scalar_stores:
            return False
        return self.vector_accesses or (not self.loose and max(self.parts.values(), default=0) > 1)

    @property
    def is_atomic(self) -> bool:
        """Whether elements that share a word are written one by one."""
        return self.is_packed and self.scalar_stores

    def note(self, i: int) -> None:
        """Record instruction i, an access to this memory. All accesses are recorded before code is written, as they decide the array's
        type."""
        store = self.w.code[i].op in STORE_OPS
        whole = self.is_whole(i)
        self.accessed = True
        self.stored |= store
        self.vector_accesses |= whole
        self.scalar_stores |= store and not whole
        if not whole and not store:
            part = self.part_of(i)
            if part is None:
                self.loose = True
            else:
                self.parts[self.w.code[i].src[1], part[0]] += 1

    def part_of(self, i: int) -> tuple[int, int] | None:
        """Return the part of a vector that a scalar load reads: (the vector's offset from the index, the component); None if unknown."""
        op, _, lanes, src, offset = self.w.code[i]
        if op != "LOAD" or lanes != 1 or not self.whole or self.op not in GLOBAL:
            return None
        modulus, remainder = self.w.facts.residue[src[1]]
        component = (remainder + offset) % CHUNK_LANES
        return (offset - component, component) if modulus % CHUNK_LANES == 0 else None

    def is_whole(self, i: int) -> bool:
        """Whether an access consists of complete vectors, or of complete words if several elements share a word."""
        op, _, lanes, src, arg = self.w.code[i]
        if op not in ("LOAD", "STORE") or not self.whole or self.op not in GLOBAL:
            return False
        offset = arg if op == "LOAD" else arg[0]
        unit = self.per_word if self.is_packed else CHUNK_LANES
        mask = src[3:4] if op == "STORE" else src[2:3]
        scalar_mask = not mask or self.w.code[mask[0]].lanes == 1
        return lanes % unit == 0 and scalar_mask and self.w.facts.residue[src[1]].divisor(offset) % unit == 0

    # -- declarations -----------------------------------------------------------------------------
    def stored_type(self) -> str:
        """Return the type of the variable's elements."""
        if self.is_packed:
            return "atomic<u32>" if self.is_atomic else "u32"
        scalar = "f16" if self.is_half else REGISTER_TYPES[self.dtype.name]
        if scalar == "bool":
            return "u32"
        return vector(scalar, CHUNK_LANES) if self.is_vectors else scalar

    def declare(self, binding: int) -> str:
        """Declare a variable with a binding."""
        return f"@group(0) @binding({binding}) var<storage, read_write> {self.name}: array<{self.stored_type()}>;"

    def declare_private(self, size: int) -> str:
        """Declare scratch or shared memory with this number of elements."""
        space = "private" if self.op == "SCRATCH" else "workgroup"
        return f"var<{space}> {self.name}: array<{self.stored_type()}, {size}>;"

    # -- elements ---------------------------------------------------------------------------------
    def place(self, index: str, named: bool = False) -> str:
        """Return the number of an element in the variable, as an expression; `named`: as a name, because the caller uses the text
        several times."""
        if self.base:
            index = f"{index} + {self.base}"
        return index if index.isalnum() or not named else self.w.let(index)

    def read(self, index: str) -> str:
        """Return an expression that reads one element."""
        at, dtype = self.place(index, self.is_packed or self.is_vectors), self.dtype
        let = self.w.let if self.stored or self.op not in GLOBAL else self.w.let_once
        if self.is_packed:
            bits = 8 * dtype.itemsize
            words = f"{self.name}[{at} >> {self.word_shift}u]"
            words = f"atomicLoad(&{words})" if self.is_atomic else words
            shift = f"(u32({at}) & {self.per_word - 1}u) * {bits}u"
            return from_bits(dtype, f"extractBits({words}, {shift}, {bits}u)")
        if self.is_vectors:
            return let(self._widened(f"{self.name}[{at} >> 2u][{at} & 3i]", 1))
        return let(self._widened(f"{self.name}[{at}]", 1))

    def read_part(self, i: int) -> str:
        """Return an expression for the element that scalar load i reads. If it is known which vector contains the element, the whole
        vector is read, so that loads of its neighbours read nothing again."""
        w, part = self.w, self.part_of(i) if self.is_vectors else None
        if part is None:
            return self.read(_lanes_at(w, i)[0])
        vector = self.read_whole(_sum(w.value[w.code[i].src[1]][0], part[0]), CHUNK_LANES)[0]
        return f"{vector}.{COMPONENTS[part[1]]}"

    def _widened(self, text: str, width: int) -> str:
        """Convert elements from their type in memory to their type in registers."""
        if self.is_half:
            self.w.uses_half = True
            return f"{vector('f32', width)}({text})"
        return f"({text} != 0u)" if self.dtype.kind == "b" and not self.is_packed else text

    def _narrowed(self, text: str, width: int) -> str:
        """Convert elements from their type in registers to their type in memory."""
        if self.is_half:
            self.w.uses_half = True
            return f"{vector('f16', width)}({text})"
        return f"u32({text})" if self.dtype.kind == "b" and not self.is_packed else text

    def write(self, index: str, text: str) -> None:
        """Write code that stores the value `text` to one element."""
        w, dtype, at = self.w, self.dtype, self.place(index, self.is_packed)
        if not self.is_packed:
            w.line(f"{self.name}[{at}] = {self._narrowed(text, 1)};")
            return
        bits = 8 * dtype.itemsize
        shift = w.let(f"(u32({at}) & {self.per_word - 1}u) * {bits}u")
        place = f"&{self.name}[{at} >> {self.word_shift}u]"
        value = w.let(f"{bits_of(dtype, text)} << {shift}")
        w.line(f"atomicAnd({place}, ~({(1 << bits) - 1}u << {shift}));")
        w.line(f"atomicOr({place}, {value});")

    # -- whole vectors ----------------------------------------------------------------------------
    def read_whole(self, index: str, lanes: int) -> list[str]:
        """Read `lanes` elements from `index` on, where a vector begins (a word if elements are packed). Returns the chunks of the value."""
        w, at = self.w, self.place(index)
        if not self.is_packed:
            first = w.let_once(f"({at}) >> 2u")
            let = w.let if self.stored else w.let_once
            return [let(self._widened(f"{self.name}[{first} + {k}i]" if k else f"{self.name}[{first}]", CHUNK_LANES))
                    for k in range(lanes // CHUNK_LANES)]
        first = w.let(f"({at}) >> {self.word_shift}u")
        words = []
        for k in range(lanes // self.per_word):
            place = f"{self.name}[{first} + {k}i]" if k else f"{self.name}[{first}]"
            words.append(w.let(f"atomicLoad(&{place})" if self.is_atomic else place))
        if self.dtype.itemsize == 1:
            function = "unpack4xI8" if self.dtype.kind == "i" else "unpack4xU8"
            unpacked = [f"{function}({x})" for x in words]
            return [w.let(f"({x} != vec4<u32>(0u))" if self.dtype.kind == "b" else x) for x in unpacked]
        return gathered(w, self.dtype, [part for x in words for part in _halves(self.dtype, x)])

    def write_whole(self, index: str, chunks: Sequence[str], lanes: int) -> None:
        """Write `lanes` elements, given as chunks, from `index` on, where a vector begins (a word if elements are packed)."""
        w, at = self.w, self.place(index)
        if not self.is_packed:
            first = w.let(f"({at}) >> 2u")
            for k, text in enumerate(chunks):
                w.line(f"{self.name}[{first}{f' + {k}i' if k else ''}] = {self._narrowed(text, CHUNK_LANES)};")
            return
        first = w.let(f"({at}) >> {self.word_shift}u")
        for k in range(lanes // self.per_word):
            if self.dtype.itemsize == 1:
                text = f"vec4<u32>({chunks[k]})" if self.dtype.kind == "b" else chunks[k]
                packed = f"pack4x{'I' if self.dtype.kind == 'i' else 'U'}8({text})"
            elif self.dtype.name == "float16":
                packed = f"pack2x16float(vec2<f32>({lane(chunks, lanes, 2 * k)}, {lane(chunks, lanes, 2 * k + 1)}))"
            else:
                low, high = (bits_of(self.dtype, lane(chunks, lanes, 2 * k + n)) for n in (0, 1))
                packed = f"{low} | ({high} << 16u)"
            place = f"{self.name}[{first}{f' + {k}i' if k else ''}]"
            w.line(f"atomicStore(&{place}, {packed});" if self.is_atomic else f"{place} = {packed};")


def _halves(dtype: DType, text: str) -> tuple[str, str]:
    """Unpack the two elements of a word."""
    if dtype.name == "float16":
        return f"unpack2x16float({text}).x", f"unpack2x16float({text}).y"
    if dtype.name == "bfloat16":
        return f"bitcast<f32>({text} << 16u)", f"bitcast<f32>({text} & 0xffff0000u)"
    return from_bits(dtype, f"({text} & 0xffffu)"), from_bits(dtype, f"({text} >> 16u)")


# -- instructions -------------------------------------------------------------------------------------
def _lanes_at(w: WgslWriter, i: int) -> list[str]:
    """Return the index of each lane of an access, as a name or a sum."""
    op, _, lanes, src, arg = w.code[i]
    if op in ("GATHER", "SCATTER"):
        return [_sum(lane(w.value[src[1]], lanes, k), arg) for k in range(lanes)]
    stride = arg[1] if op in ("LOADS", "STORES") else 1
    offset = arg if op == "LOAD" else arg[0]
    index = w.value[src[1]][0]
    return [_sum(index, offset + k * stride) for k in range(lanes)]


def _sum(index: str, offset: int) -> str:
    if not offset:
        return index
    if index.endswith("i") and index[:-1].isdecimal():
        return f"{int(index[:-1]) + offset}i"
    return f"{index} + {offset}i" if offset > 0 else f"{index} - {-offset}i"


def load(w: WgslWriter, i: int, memory: PointerMemory) -> None:
    """Write instruction i, a LOAD, LOADS or GATHER."""
    _, dtype, lanes, src, _ = w.code[i]
    whole = memory.is_whole(i) and (memory.is_vectors or memory.is_packed)

    def read() -> list[str]:
        if lanes == 1 and not whole:
            return [memory.read_part(i)]
        places = _lanes_at(w, i)
        return memory.read_whole(places[0], lanes) if whole else gathered(w, dtype, [memory.read(at) for at in places])

    if len(src) == 2:
        w.value.append(read())
        return
    mask, alt = w.value[src[2]], w.value[src[3]]
    if w.code[src[2]].lanes < lanes or whole:       # one condition for all lanes
        _load_where(w, dtype, lanes, mask[0], alt, read)
        return
    scalars = [memory.read(w.let(f"select(0i, {at}, {lane(mask, lanes, k)})")) for k, at in enumerate(_lanes_at(w, i))]
    w.value.append([w.let(f"select({other}, {text}, {m})") for other, text, m in zip(alt, gathered(w, dtype, scalars), mask, strict=True)])


def _load_where(w: WgslWriter, dtype: DType, lanes: int, mask: str, alt: Sequence[str], read: Callable[[], list[str]]) -> None:
    """Write the values that `read` loads if a scalar mask is true, otherwise `alt`."""
    names = []
    for width, text in zip(widths(lanes), alt, strict=True):
        w.names += 1
        names.append(f"m{w.names}")
        w.line(f"var {names[-1]}: {register(dtype, width)} = {text};")
    w.open(f"if ({mask}) {{")
    for name, text in zip(names, read(), strict=True):
        w.line(f"{name} = {text};")
    w.close()
    w.value.append([w.let(name) for name in names])


def store(w: WgslWriter, i: int, memory: PointerMemory) -> None:
    """Write instruction i, a STORE, STORES or SCATTER."""
    _, _, lanes, src, _ = w.code[i]
    places, chunks = _lanes_at(w, i), w.value[src[2]]
    mask = w.value[src[3]] if len(src) == 4 else None
    if mask is None or w.code[src[3]].lanes < lanes or lanes == 1:
        if mask is not None:
            w.open(f"if ({mask[0]}) {{")
        if memory.is_whole(i) and (memory.is_vectors or memory.is_packed):
            memory.write_whole(places[0], chunks, lanes)
        else:
            for k, at in enumerate(places):
                memory.write(at, lane(chunks, lanes, k))
        if mask is not None:
            w.close()
        return
    for k, at in enumerate(places):
        w.open(f"if ({lane(mask, lanes, k)}) {{")
        memory.write(at, lane(chunks, lanes, k))
        w.close()


def memories_of(w: WgslWriter) -> dict[int, PointerMemory]:
    """Map the instruction number of each pointer of a phase to its memory, after recording all accesses."""
    made: dict[tuple[str, int], PointerMemory] = {}
    found: dict[int, PointerMemory] = {}
    for i, (op, dtype, _, src, arg) in enumerate(w.code):
        if op in ("ARG", "TEMP", "SCRATCH", "SHARED"):
            found[i] = made.setdefault((op, arg), PointerMemory(w, op, arg, dtype))
        elif op in LOADS_OPS or op in STORE_OPS:
            found[src[0]].note(i)
    return found
