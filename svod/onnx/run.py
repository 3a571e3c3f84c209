"""Runs a model once with inputs that it makes: what `svod-tune model.onnx` captures, and what compares svod with onnxruntime.

    python -m svod.onnx.run model.onnx --dim sequence=128
    python -m svod.onnx.run model.onnx --dim sequence=128 --check        compares with onnxruntime, or with the reference
"""
from __future__ import annotations

import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import click
import numpy as np
import onnx

from svod.core.ir.variable import Variable
from svod.errors import SvodError
from svod.onnx.compare import relative_difference
from svod.onnx.model import Input, Model, load
from svod.onnx.reader import OnnxError
from svod.onnx.registry import Array

BATCH_NAMES = ("batch", "batch_size", "n", "b")
MANY_OPERATIONS = 1 << 20       # elements of weights up to which the reference, which is slow, is compared with


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", metavar="MODEL.onnx", type=click.Path(exists=True, dir_okay=False))
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="The size of a free dimension, or a range as in sequence=1..512.")
@click.option("--shape", "shapes", multiple=True, metavar="INPUT=1x3x224x224", help="The shape of an input.")
@click.option("--inputs", type=click.Path(exists=True, dir_okay=False), metavar="FILE.npz", help="Arrays by the names of the inputs.")
@click.option("--random-weights", is_flag=True, help="Random numbers in place of weights that the file computes from constants.")
@click.option("--check", is_flag=True, help="Compare the outputs with onnxruntime, or with the reference where that is not installed.")
def cli(path: str, dims: Sequence[str], shapes: Sequence[str], inputs: str | None, random_weights: bool, check: bool) -> None:
    """Run MODEL once."""
    try:
        started = time.perf_counter()
        source: Any = with_random_weights(onnx.load(path)) if random_weights else path
        model = load(source, dims=dimensions(dims))
        feed = make_feed(model, shapes_of(shapes), arrays_in(inputs) if inputs else {}, path)
        outputs = model(feed)
        print(f"{path}: {len(model.plans[-1].kernels)} kernels, loaded and run in {time.perf_counter() - started:.1f} s", flush=True)
        if check:
            print(difference(source, feed, outputs if isinstance(outputs, tuple) else (outputs,), model), flush=True)
    except (SvodError, OSError) as e:
        print(f"svod: {e}", file=sys.stderr)
        sys.exit(2)


def dimensions(texts: Sequence[str]) -> dict[str, int | Variable]:
    """--dim as `load` takes it. Raises OnnxError."""
    out: dict[str, int | Variable] = {}
    for text in texts:
        name, _, size = text.partition("=")
        low, dots, high = size.partition("..")
        if not name or not low.isdecimal() or (dots and not high.isdecimal()):
            raise OnnxError(f"--dim {text}: give a size or a range, as in --dim sequence=128 or --dim sequence=1..512")
        identifier = "".join(c if c.isalnum() else "_" for c in name)
        out[name] = Variable(identifier if identifier[:1].isalpha() else f"d_{identifier}", int(low), int(high)) if dots else int(low)
    return out


def arrays_in(path: str) -> dict[str, Array]:
    """--inputs: the arrays of a .npz file by their names. Raises OnnxError."""
    try:
        found = np.load(path)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        return dict(found)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as e:
        raise OnnxError(f"--inputs {path} is no .npz file of arrays, as numpy.savez({path!r}, name=array) makes: {e}") from None


def shapes_of(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """--shape by input. Raises OnnxError."""
    out = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        parts = sizes.replace(",", "x").split("x")
        if not equals or not all(p.isdecimal() for p in parts):
            raise OnnxError(f"--shape {text}: give the input and its extents, as in --shape x=1x3x224x224")
        out[name] = tuple(int(p) for p in parts)
    return out


def make_feed(model: Model, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Array], path: str) -> dict[str, Array]:
    """Inputs for a run: those given, else small numbers of the declared types. Raises OnnxError, with the command to paste, for dimensions
    without a size."""
    known = {i.name for i in model.inputs}
    if unknown := sorted((shapes.keys() | given.keys()) - known):
        raise OnnxError(f"the model has no input {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    rng, missing, feed = np.random.default_rng(0), dict[str, None](), dict[str, Array]()
    for i in model.inputs:
        if i.name in given:
            feed[i.name] = given[i.name]
            continue
        shape = shapes.get(i.name) or tuple(_size_of(model, i, axis, missing) for axis in range(len(i.shape or ())))
        feed[i.name] = _numbers(i, shape, rng)
    if missing:
        free = list(missing)
        words = "; ".join(f"{i.name} {i.dtype}[{', '.join('?' if n is None else str(n) for n in i.shape or ())}]" for i in model.inputs)
        options = " ".join(f"--dim {n}=128" if n[:1] != "-" else f"--shape {n[1:]}" for n in free)
        raise OnnxError(f"{', '.join(n.lstrip('-') for n in free)} {'have' if len(free) > 1 else 'has'} no size; the inputs are {words}. "
                        f"Give one: svod-tune {path} {options}" + (f", or a range: --dim {free[0]}=1..512" if free[0][:1] != "-" else ""))
    return feed


def _size_of(model: Model, i: Input, axis: int, missing: dict[str, None]) -> int:
    n = (i.shape or ())[axis]
    if isinstance(n, int):
        return n
    chosen = model.dims.get(n) if n is not None else None
    if isinstance(chosen, int):
        return chosen
    if isinstance(chosen, Variable):
        return int(chosen.expr.arg[2])
    if axis == 0 and (n is None or n.lower() in BATCH_NAMES or n.lower().startswith(("batch", "unk__"))):
        return 1
    example = "x".join("1" if s is None or isinstance(s, str) else str(s) for s in i.shape or ())
    missing[n if n is not None else f"-{i.name}={example}"] = None
    return 1


def _numbers(i: Input, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    kind = np.dtype(i.dtype if i.dtype != "bfloat16" else "float32")
    if kind.kind == "f":
        return rng.standard_normal(shape).astype(kind)
    if kind.kind == "b" or "mask" in i.name.lower():
        return np.ones(shape, kind)
    return rng.integers(0, 2, shape).astype(kind)


def with_random_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with weights in place of the outputs of ConstantOfShape with known shapes: files without weights compute them so."""
    known = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    known |= {n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node
              if n.op_type == "Constant" and n.attribute and n.attribute[0].name == "value"}
    rng, kept = np.random.default_rng(0), []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in known:
            shape = tuple(int(n) for n in known[node.input[0]])
            fan = max(1, int(np.prod(shape[1:])))
            values = rng.standard_normal(shape) / np.sqrt(fan) if len(shape) > 1 else rng.uniform(0.5, 1.0, shape)
            model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), node.output[0]))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def difference(source: Any, feed: Mapping[str, Array], outputs: Sequence[Array], model: Model) -> str:
    """The largest difference to another runtime, relative to the largest output, in words."""
    name, run = _other(source, model)
    if run is None:
        return f"not compared: {name}"
    names = [o.name for o in model.outputs]
    theirs = run(names, dict(feed))
    worst = max((relative_difference(a, b) for a, b in zip(outputs, theirs, strict=True)), default=0.0)
    return f"largest difference to {name}: {worst:.1e} of the largest output"


def _other(source: Any, model: Model) -> tuple[str, Any]:
    """The runtime to compare with: its name, and its run."""
    data = source if isinstance(source, str) else source.SerializeToString()
    if find_spec("onnxruntime") is not None:
        import onnxruntime
        return f"onnxruntime {onnxruntime.__version__}", onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run
    weights = sum(int(np.prod(t.dims)) for t in model.proto.graph.initializer)
    if weights > MANY_OPERATIONS:
        return "onnxruntime is not installed, and the reference would take too long", None
    from onnx.reference import ReferenceEvaluator
    return "the reference of the onnx package", ReferenceEvaluator(model.proto).run


if __name__ == "__main__":
    cli()
