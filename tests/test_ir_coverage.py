"""tests/ir_coverage.md is complete and true: every operation of the Rune document has a row, every name in it exists, and what the graph
level can express is built, printed, scheduled and computed."""
from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod.compile.lower import linear
from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops
from svod.tensor import Tensor
from svod.tensor.operations.random import threefry2x32
from tests.graph_reference import evaluate_graph
from tests.tensor.checking import run_schedule

ROOT = Path(__file__).resolve().parents[1]

DOCUMENT = {
    "Graph": ["Buffer", "Buffer_View", "Placeholder", "Const_Scalar", "Vconst", "Binop", "Unary", "Ternary", "View", "Reshape", "Permute",
              "Expand", "Pad", "Shrink", "Flip", "Reduce_Axis", "Valid", "Index", "Gep", "Vectorize", "Wmma", "Cast", "Bitcast",
              "Contiguous", "Copy", "Assign", "Define_Var", "Bind", "Detach", "Contiguous_Backward", "Sink", "Kernel", "Unique", "Device",
              "Multi", "Fuse", "Unroll", "Contract", "Cat", "Threefry", "Gather", "Scatter", "Custom", "Noop"],
    "Kinds": ["Add", "Mul", "Sub", "Div", "Idiv", "Fdiv", "Mod", "Pow", "Max", "Min", "Cmplt", "Cmpne", "Xor", "Or", "And", "Shl", "Shr",
              "Neg", "Log2", "Exp2", "Sin", "Sqrt", "Recip", "Where", "Mulacc", "Reduce_Sum", "Reduce_Max", "Reduce_Prod"],
    "Lowered": ["L_Buffer", "L_Local", "L_Acc", "L_Define_Global", "L_Const", "L_Vconst", "L_Special", "L_Define_Var", "L_Range",
                "L_EndRange", "L_If", "L_EndIf", "L_Barrier", "L_Block", "L_Unroll", "L_Load", "L_Store", "L_ALU", "L_Gep", "L_Vectorize",
                "L_Ptrcat", "L_Wmma", "L_Cast", "L_Bitcast", "L_Assign", "L_Custom", "L_Noop"],
}


def rows() -> dict[str, list[tuple[str, str, str]]]:
    """Per section of the page its rows: operation, names, how."""
    text = (ROOT / "tests" / "ir_coverage.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    return {name: re.findall(r"^\| (\w+) \| (.+?) \| (.*?)\|$", body, re.M)[1:] for name, body in sections.items()}


def test_every_operation_of_the_document_has_one_row() -> None:
    assert {section: [operation for operation, _, _ in found] for section, found in rows().items()} == DOCUMENT


def exists(name: str) -> bool:
    if name.startswith("Ops."):
        return hasattr(Ops, name[4:])
    if name.startswith("LINEAR "):
        op = name[7:]
        return op in linear.ARITY or f'"{op}"' in Path(linear.__file__).read_text(encoding="utf-8")
    if name.startswith("Tensor."):
        return hasattr(Tensor, name[7:])
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("operation", "names", "how"), [row for found in rows().values() for row in found])
def test_what_a_row_names_exists_or_has_a_reason(operation: str, names: str, how: str) -> None:
    found = re.findall(r"`([^`]+)`", names)
    assert all(map(exists, found)), f"{operation}: {[n for n in found if not exists(n)]}"
    assert found or (names == "—" and len(how.split()) >= 5), f"{operation} needs a name or a reason"


def test_names_that_do_not_exist_are_found() -> None:
    for name in ("Ops.SCAN", "LINEAR IF", "Tensor.backward", "svod.core.schedule.cut.fuse"):
        assert not exists(name)


A, B, C = np.array([[1.5, 4, -2]], np.float32), np.array([[2, 0.5, 4]], np.float32), np.array([[1, 2, 3]], np.float32)
M, N = np.array([[5, -7, 6]], np.int32), np.array([[2, 3, 1]], np.int32)


def alu(op: Ops, *arrays: Any) -> Tensor:
    return Tensor.from_uop(graph.alu(op, *(Tensor(a).uop for a in arrays)))


def threefry() -> Tensor:
    zero = graph.full((2,), 0, dtypes.uint32)
    return Tensor.from_uop(threefry2x32(zero, zero, (0, 0))[0])


def detached() -> Tensor:
    return Tensor.from_uop(graph.detach(Tensor(A).uop))


Example = Callable[[], tuple[Tensor, Any]]
EXAMPLES: dict[str, Example] = {
    "Add": lambda: (alu(Ops.ADD, A, B), A + B), "Mul": lambda: (alu(Ops.MUL, A, B), A * B), "Sub": lambda: (alu(Ops.SUB, A, B), A - B),
    "Div": lambda: (Tensor(A) / Tensor(B), A / B), "Idiv": lambda: (alu(Ops.IDIV, M, N), M // N),
    "Fdiv": lambda: (alu(Ops.FDIV, A, B), A / B), "Mod": lambda: (alu(Ops.MOD, M, N), M % N),
    "Pow": lambda: (alu(Ops.POW, B, A), B ** A), "Max": lambda: (alu(Ops.MAX, A, B), np.maximum(A, B)),
    "Min": lambda: (alu(Ops.MIN, A, B), np.minimum(A, B)), "Cmplt": lambda: (alu(Ops.CMPLT, A, B), A < B),
    "Cmpne": lambda: (alu(Ops.CMPNE, A, B), A != B), "Xor": lambda: (alu(Ops.XOR, M, N), M ^ N), "Or": lambda: (alu(Ops.OR, M, N), M | N),
    "And": lambda: (alu(Ops.AND, M, N), M & N), "Shl": lambda: (alu(Ops.SHL, M, N), M << N), "Shr": lambda: (alu(Ops.SHR, M, N), M >> N),
    "Neg": lambda: (alu(Ops.NEG, A), -A), "Log2": lambda: (alu(Ops.LOG2, B), np.log2(B)), "Exp2": lambda: (alu(Ops.EXP2, A), np.exp2(A)),
    "Sin": lambda: (alu(Ops.SIN, A), np.sin(A)), "Sqrt": lambda: (alu(Ops.SQRT, B), np.sqrt(B)),
    "Recip": lambda: (alu(Ops.RECIPROCAL, B), 1 / B), "Where": lambda: (alu(Ops.WHERE, A > 0, A, B), np.where(A > 0, A, B)),
    "Mulacc": lambda: (alu(Ops.MULACC, A, B, C), A * B + C), "Reduce_Sum": lambda: (Tensor(A).sum(), A.sum()),
    "Reduce_Max": lambda: (Tensor(A).max(), A.max()), "Reduce_Prod": lambda: (Tensor(A).prod(), A.prod()),
    "Reshape": lambda: (Tensor(A).reshape(3, 1) + 0, A.reshape(3, 1)), "Permute": lambda: (Tensor(A).T + 0, A.T),
    "Expand": lambda: (Tensor(A).expand(2, 3) + 0, np.broadcast_to(A, (2, 3))), "Const_Scalar": lambda: (Tensor(A) + 3, A + 3),
    "Pad": lambda: (Tensor(A).pad((1, 2), value=7), np.pad(A, [(0, 0), (1, 2)], constant_values=7)),
    "Shrink": lambda: (Tensor(A)[:, 1:], A[:, 1:]), "Flip": lambda: (Tensor(A).flip(1), A[:, ::-1]),
    "Buffer_View": lambda: (Tensor(A)[:, 1:] + 0, A[:, 1:]),
    "View": lambda: (Tensor(A).T.flip(0).pad((1, 0)), np.pad(A.T[::-1], [(0, 0), (1, 0)])),
    "Vconst": lambda: (Tensor.arange(4) + 0, np.arange(4)), "Index": lambda: (Tensor(A).take([2, 0], 1), A[:, [2, 0]]),
    "Gather": lambda: (Tensor(A).gather(1, Tensor(N - 1)), np.take_along_axis(A, N - 1, 1)),
    "Gep": lambda: (Tensor(A).argmax(), A.argmax()),
    "Valid": lambda: (Tensor(A).pad((1, 0)).mul(2), np.pad(A, [(0, 0), (1, 0)]) * 2), "Cast": lambda: (Tensor(A).int(), A.astype(np.int32)),
    "Bitcast": lambda: (Tensor(A).bitcast("int32"), A.view(np.int32)), "Contiguous": lambda: (Tensor(A).T.contiguous(), A.T),
    "Copy": lambda: (Tensor.from_uop(graph.copy(Tensor(A).uop, "CPU")), A), "Detach": lambda: (detached() + 1, A + 1),
    "Noop": lambda: (detached() * 2, A * 2),
    "Contract": lambda: (Tensor.einsum("ij,kj->ik", A, B), A @ B.T),
    "Cat": lambda: (Tensor.cat([Tensor(A), Tensor(B)]), np.concatenate([A, B])),
    # known answers of Random123 for a counter and a key of zeros
    "Threefry": lambda: (threefry(), np.full(2, 0x6B200159, np.uint32)),
    "Scatter": lambda: (Tensor(A).scatter(1, Tensor(N - 1), Tensor(B)), np.array([[4, 2, 0.5]], np.float32)),
    "Custom": lambda: (Tensor(A).cumsum(1), np.cumsum(A, 1)),
}
# in every example, or in tests of their own
NOT_VALUES = {"Buffer", "Placeholder", "Binop", "Unary", "Ternary", "Reduce_Axis", "Sink", "Kernel", "Unique", "Device", "Assign", "Multi"}
BELOW_THE_GRAPH = {"Vectorize", "Wmma", "Define_Var", "Bind", "Unroll"}      # only kernels and programs have them


def test_every_graph_operation_has_an_example_or_a_reason_not_to() -> None:
    graph_level = {operation for section in ("Graph", "Kinds") for operation, names, _ in rows()[section] if names != "—"}
    assert graph_level == EXAMPLES.keys() | NOT_VALUES | BELOW_THE_GRAPH


@pytest.mark.parametrize("operation", EXAMPLES)
def test_it_is_built_printed_scheduled_and_computed(operation: str) -> None:
    tensor, expected = EXAMPLES[operation]()
    nodes = tensor.uop.toposort()
    assert all(repr(u).startswith(f"<{u.op.value} ") for u in nodes)
    names = next(names for found in rows().values() for name, names, _ in found if name == operation)
    named = set(re.findall(r"`Ops\.(\w+)`", names))
    assert not named or named & {u.op.value for u in nodes}, f"the example of {operation} holds none of {named}"
    np.testing.assert_allclose(run_schedule(tensor), expected, rtol=1e-6)
    if "CUSTOM_FUNCTION" not in named:      # the interpreter of graphs has no library kernels
        np.testing.assert_allclose(evaluate_graph(tensor.uop), expected, rtol=1e-6)
