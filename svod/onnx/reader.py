"""Reads a model from a file: the checked protobuf message, and the arrays of its tensors, which are memory-mapped if possible."""
from __future__ import annotations

import heapq
import io
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import external_data_helper, inliner, numpy_helper

from svod.core.graph.buffer import give_back
from svod.errors import SvodError, UnsupportedError
from svod.onnx.mapping import small_model
from svod.onnx.registry import Array
from svod.onnx.schemas import mistakes_in
from svod.system.files import open_file


class OnnxError(SvodError):
    """A file that is no valid ONNX model, or inputs that do not fit one."""


Source = str | os.PathLike[str] | bytes | BinaryIO | onnx.ModelProto

IR_VERSION = b"\x08"      # the tag of a model's first field, which writers put first
WITHIN = "(the model itself)"        # stands for the file name in tensors of a model without a file
SUPPORTED_TYPES = "svod computes with bool, integers of 8 to 64 bits, float16, bfloat16, float32 and float64"
LEFT_IN_FILE = 1 << 18      # least number of bytes of an array that is copied to aligned memory only where something needs it there
NUMPY_TYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.DOUBLE: "float64", onnx.TensorProto.FLOAT16: "float16",
               onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.BOOL: "bool",
               **{getattr(onnx.TensorProto, f"{s}INT{b}"): f"{s.lower()}int{b}" for s in ("", "U") for b in (8, 16, 32, 64)}}


def read_model(source: Source) -> tuple[onnx.ModelProto, Arrays]:
    """The model, and the `Arrays` of its tensors. Raises OnnxError and FileError."""
    if isinstance(source, onnx.ModelProto):
        return _checked(source, "the model"), Arrays(None)
    folder, name, what = None, "", "the model"
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = memoryview(source).cast("B")
    elif isinstance(source, (str, os.PathLike)):
        path, what = Path(source).resolve(), str(source)
        folder, name, data = path.parent, path.name, _mapped(path)
    elif isinstance(source, io.IOBase) or hasattr(source, "read"):
        read = source.read()
        if not isinstance(read, (bytes, bytearray, memoryview)):
            raise OnnxError(f"the file gives {type(read).__name__}; open it to read bytes: open(path, 'rb')")
        data = memoryview(read).cast("B")
    else:
        raise OnnxError(f"a path, bytes, a file or a ModelProto is needed, got {type(source).__name__}")
    try:
        small = small_model(data, name or WITHIN)
    except ValueError as e:
        begins = bytes(data[:40])
        seen = "" if begins.startswith(IR_VERSION) else f"; it begins with {begins!r}"
        pointer = ": a pointer of Git LFS, git lfs pull gets the file" if begins.startswith(b"version https://git-lfs") else ""
        raise OnnxError(f"{what} is no ONNX model, or is cut off: {e}{seen}{pointer}") from None
    return _checked(_parse(small, what), what), Arrays(folder, name or WITHIN, data)


def _mapped(path: Path) -> memoryview:
    """The bytes of a file. Raises FileError."""
    with open_file(path) as f:
        return memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)) if f.seek(0, 2) else memoryview(b"")


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as e:  # the type of protobuf's errors depends on its implementation
        raise OnnxError(f"{what} is no ONNX model, or is cut off: {e}") from None
    return model


def _checked(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """The model with its functions inlined. Raises OnnxError for an invalid graph, UnsupportedError for an operator set that is newer
    than the onnx package."""
    if not model.graph.node and not model.graph.output:
        raise OnnxError(f"{what} is no ONNX model: it has no graph")
    if not model.opset_import and model.ir_version >= 3:
        raise OnnxError(f"{what} does not say which operator sets it uses")
    newest = onnx.defs.onnx_opset_version()
    if (asked := opsets(model).get("", newest)) > newest:
        raise UnsupportedError(f"{what} is of opset {asked}, and the onnx package {onnx.__version__} knows {newest}: update that package, "
                               f"or export the model with opset {newest}")
    if model.functions:
        try:
            model = inliner.inline_local_functions(model)
        except Exception as e:  # errors of a C++ library with its own types
            raise OnnxError(f"{what}: its functions cannot be put in place: {e}") from None
    _check_graph(model.graph, set(), what)
    versions = opsets(model)
    mistakes = [f"{title_of(n)} {m}" for n in all_nodes(model.graph) for m in mistakes_in(n, domain_of(n), versions.get(domain_of(n), 1))]
    if mistakes:
        raise OnnxError(f"{what} is no valid model:\n  " + "\n  ".join(mistakes))
    return model


def _check_graph(graph: onnx.GraphProto, outer: set[str], what: str) -> None:
    """Raise OnnxError if a value of a graph is computed twice, not at all, or from itself."""
    _check_names(graph, what)
    made = {i.name for i in graph.input} | {i.name for i in graph.initializer} | {i.values.name for i in graph.sparse_initializer}
    for node in graph.node:
        for name in node.output:
            if name and name in made:
                raise OnnxError(f"{what}: {name!r} is made twice, the second time by {title_of(node)}")
            made.add(name)
    for node in graph.node:
        for name in node.input:
            if name and name not in made and name not in outer:
                raise OnnxError(f"{what}: {title_of(node)} reads {name!r}, which nothing makes")
        for sub in subgraphs(node):
            _check_graph(sub, outer | made, what)
    if len(order := in_order(graph)) < len(graph.node):
        done = {name for node in order for name in node.output}
        node = next(n for n in graph.node if not done.issuperset(n.output))
        raise OnnxError(f"{what}: the nodes have a cycle: {title_of(node)} reads {', '.join(map(repr, reads(node)))}; one of these "
                        "depends on the node itself, or on another cycle")
    for o in graph.output:
        if o.name not in made | outer:
            raise OnnxError(f"{what}: nothing makes the output {o.name!r}")


def in_order(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph, each after the nodes that it reads, otherwise in the file's order. Nodes on a cycle, and nodes that depend
    on one, are missing."""
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    waiting: list[int] = []         # for each node, the number of nodes that it reads and that are not in `order` yet
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(graph.node):
        before = {maker[name] for name in reads(node) if name in maker}
        waiting.append(len(before))
        for j in before:
            readers.setdefault(j, []).append(i)
    ready, order = [i for i, n in enumerate(waiting) if n == 0], []
    while ready:
        i = heapq.heappop(ready)
        order.append(graph.node[i])
        for j in readers.get(i, ()):
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    return order


def needed_for(wanted: Iterable[str], nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes that the wanted values depend on, in their order."""
    needed, chosen = set(wanted), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            chosen.append(node)
            needed.update(reads(node))
    return chosen[::-1]


def reads(node: onnx.NodeProto) -> list[str]:
    """The values that a node reads, either itself or in its subgraphs."""
    names = [n for n in node.input if n]
    for sub in subgraphs(node):
        inner = list(all_nodes(sub))
        inside = {o for n in inner for o in n.output} | {i.name for i in sub.input} | {i.name for i in sub.initializer}
        read = [*(name for n in inner for name in n.input), *(o.name for o in sub.output)]
        names += [name for name in read if name and name not in inside]
    return names


def _check_names(graph: onnx.GraphProto, what: str) -> None:
    """Raise OnnxError if two inputs, or two initializers, have one name."""
    weights = [*(i.name for i in graph.initializer), *(i.values.name for i in graph.sparse_initializer)]
    for words, names in (("the inputs", [i.name for i in graph.input]), ("the initializers", weights)):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise OnnxError(f"{what}: {words} have two of the name {twice[0]!r}")


def overridable(model: onnx.ModelProto) -> list[str]:
    """The initializers that a call may override, because they are inputs as well. Before version 4 of the format every initializer had
    to be an input, and could not be overridden."""
    given = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    return [i.name for i in model.graph.input if i.name in given] if model.ir_version >= 4 else []


def opsets(model: onnx.ModelProto) -> dict[str, int]:
    """The version of each operator set by domain; "" stands for ai.onnx."""
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import} or {"": 1}


def domain_of(node: onnx.NodeProto) -> str:
    """The domain of a node's operator; "" stands for ai.onnx."""
    return "" if node.domain == "ai.onnx" else str(node.domain)


def title_of(node: onnx.NodeProto) -> str:
    """The name of a node in errors: its operator, and its name or its output."""
    name = node.name or next(iter(node.output), "")
    return f"{node.op_type} {name!r}" if name else str(node.op_type)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for a in node.attribute:
        yield from [a.g] if a.type == onnx.AttributeProto.GRAPH else a.graphs


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for sub in subgraphs(node):
            yield from all_nodes(sub)


# -- tensors -------------------------------------------------------------------------------------------------------------------
class Arrays:
    """The arrays of a model's tensors. Files with external data are mapped once. `own`: the bytes of the model itself, which tensors
    refer to by the file name `name`."""

    def __init__(self, folder: Path | None, name: str = "", own: memoryview | None = None) -> None:
        self.folder, self.name, self.own = folder, name, own
        self._files: dict[Path, memoryview] = {}

    def of(self, tensor: onnx.TensorProto) -> Array:
        """The array of a tensor; bfloat16 in the type of ml_dtypes. Raises OnnxError or UnsupportedError."""
        return _aligned(self._stored(tensor))

    def by_name(self, tensors: Iterable[onnx.TensorProto]) -> dict[str, Array]:
        """The arrays of tensors by their names. Large ones are views of the file, or of the message, with elements at any address."""
        stored = {t.name: self._stored(t) for t in tensors}
        return {name: array if array.nbytes >= LEFT_IN_FILE else _aligned(array) for name, array in stored.items()}

    def _stored(self, tensor: onnx.TensorProto) -> Array:
        """The array of a tensor, whose elements may lie at any address."""
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(tensor)
        if tensor.data_type in NUMPY_TYPES and tensor.HasField("raw_data") and NUMPY_TYPES[tensor.data_type] != "bfloat16":
            return _viewed(tensor, memoryview(tensor.raw_data))
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError) as e:
            raise OnnxError(f"the tensor {tensor.name!r} cannot be read: {e}") from None

    def _external(self, tensor: onnx.TensorProto) -> Array:
        try:
            info = external_data_helper.ExternalDataInfo(tensor)
        except ValueError as e:
            raise OnnxError(f"the tensor {tensor.name!r} does not say where its data are: {e}") from None
        data = self.own if self.own is not None and info.location == self.name else self._beside(tensor.name, info.location)
        begin = info.offset or 0
        end = begin + info.length if info.length is not None else len(data)
        if end > len(data):
            raise OnnxError(f"the tensor {tensor.name!r} ends at byte {end} of {info.location!r}, which has {len(data)}")
        return _viewed(tensor, data[begin:end])

    def _beside(self, tensor: str, location: str) -> memoryview:
        """The bytes of a file in the model's folder."""
        if self.folder is None:
            raise OnnxError(f"the tensor {tensor!r} is in the file {location!r} beside the model: load the model by its path")
        if not location:
            raise OnnxError(f"the tensor {tensor!r} does not say in which file its data are")
        try:
            path = (self.folder / location).resolve()
            if self.folder not in path.parents:
                raise OnnxError(f"the tensor {tensor!r} is in {location!r}, outside of the model's folder: it is not read")
            if path not in self._files:
                if path.exists() and not path.is_file():       # opening a named pipe would block for ever
                    raise ValueError("it is no file")
                self._files[path] = _mapped(path)
        except (OSError, ValueError) as e:
            raise OnnxError(f"the tensor {tensor!r} is in {location!r}, which cannot be read: {e}") from None
        return self._files[path]

    def whole(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of a model that includes all external data, for other runtimes. Raises OnnxError if it is too large for protobuf."""
        out = onnx.ModelProto()
        out.CopyFrom(model)
        for graph in [out.graph, *(sub for node in all_nodes(out.graph) for sub in subgraphs(node))]:
            tensors = [*graph.initializer, *(a.t for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.TENSOR)]
            for t in tensors:
                if t.data_location == onnx.TensorProto.EXTERNAL:
                    data = self.of(t).tobytes()
                    t.ClearField("external_data")
                    t.ClearField("data_location")
                    t.raw_data = data
        if (size := out.ByteSize()) >= 1 << 31:
            raise OnnxError(f"the model has {size >> 20} MB, and a model that is handed to another runtime must have less than 2 GB")
        return out


def _viewed(tensor: onnx.TensorProto, data: memoryview) -> Array:
    name = NUMPY_TYPES.get(tensor.data_type)
    if type_name(tensor.data_type) in ("int2", "uint2", "int4", "uint4"):
        return _unpacked(tensor, data)
    if name is None:
        raise UnsupportedError(f"the tensor {tensor.name!r} has the type {type_name(tensor.data_type)}; {SUPPORTED_TYPES}")
    shape = tuple(tensor.dims)
    kind: Any = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if len(data) != math.prod(shape) * np.dtype(kind).itemsize:
        raise OnnxError(f"the tensor {tensor.name!r} of {shape} {name} has {len(data)} bytes")
    return np.frombuffer(data, kind).reshape(shape)


def _aligned(array: Array) -> Array:
    """An array with aligned elements, as NumPy computes faster with them: the array itself or a copy."""
    if array.flags.aligned:
        return array
    copy = array.copy()
    give_back(array)
    return copy


def _unpacked(tensor: onnx.TensorProto, data: memoryview) -> Array:
    """Unpack integers of 2 or 4 bits to one byte each; the first of a byte is in its lowest bits."""
    kind, count, bits = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), math.prod(tensor.dims), int(type_name(tensor.data_type)[-1])
    if len(data) != -(-count * bits // 8):
        raise OnnxError(f"the tensor {tensor.name!r} of {tuple(tensor.dims)} {type_name(tensor.data_type)} has {len(data)} bytes")
    packed = np.frombuffer(data, np.uint8)
    values = (packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1).reshape(-1)[:count].astype(np.int8)
    if not type_name(tensor.data_type).startswith("u"):
        values = np.where(values >> bits - 1, values - (1 << bits), values)
    return values.astype(kind).reshape(tuple(tensor.dims))


def type_name(data_type: int) -> str:
    """The name of a tensor type in NumPy's terms: float32 for FLOAT."""
    return NUMPY_TYPES.get(data_type) or onnx.TensorProto.DataType.Name(data_type).lower()


def attributes_of(node: onnx.NodeProto, arrays: Arrays) -> dict[str, Any]:
    """The attributes of a node as Python values: numbers, text, lists of them, arrays, graphs."""
    kinds = onnx.AttributeProto
    out: dict[str, Any] = {}
    for a in node.attribute:
        match a.type:
            case kinds.FLOAT: out[a.name] = a.f
            case kinds.INT: out[a.name] = a.i
            case kinds.STRING: out[a.name] = a.s.decode(errors="replace")
            case kinds.TENSOR: out[a.name] = arrays.of(a.t)
            case kinds.FLOATS: out[a.name] = list(a.floats)
            case kinds.INTS: out[a.name] = list(a.ints)
            case kinds.STRINGS: out[a.name] = [s.decode(errors="replace") for s in a.strings]
            case kinds.GRAPH: out[a.name] = a.g
            case _: out[a.name] = a
    return out


def describe_missing(missing: Iterable[tuple[str, int, int, str, str]], what: str) -> str:
    """The message about operators that svod lacks. `missing`: (operator, opset, count, first node, reason)."""
    rows = [f"  {op} (opset {version}) ×{count}, first at {first!r}" + (f"        {why}" if why else "")
            for op, version, count, first, why in missing]
    return (f"{what} has {len(rows)} operation{'s' * (len(rows) != 1)} that svod does not have:\n" + "\n".join(rows)
            + '\nload(…, fallback="onnxruntime") runs these and what depends on them on the host; load(…, outputs=[…]) leaves them out; '
              "svod-tune has --fallback and --outputs for the same")
