"""Runs a model once with generated inputs. `svod-tune model.onnx` captures such a run; `--check` compares its results.

    python -m svod.onnx.run model.onnx --dim sequence=128
    python -m svod.onnx.run model.onnx --dim sequence=128 --check        compares with onnxruntime, or with the reference
"""
from __future__ import annotations

import shlex
import sys
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import click
import numpy as np
import onnx

from svod.core.ir.variable import Variable
from svod.errors import SvodError
from svod.onnx.compare import relative_difference, values_of
from svod.onnx.fallback import RUNTIMES
from svod.onnx.model import Input, Model, load
from svod.onnx.reader import OnnxError, read_model
from svod.onnx.registry import Array
from svod.system.process.streams import tell

BATCH_NAMES = ("batch", "batch_size", "n", "b")
MANY_WEIGHTS = 1 << 20       # most elements of weights for a comparison with the reference evaluator, which is slow


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", metavar="MODEL.onnx", type=click.Path(exists=True, dir_okay=False))
@click.option("--dim", "dims", multiple=True, metavar="NAME=SIZE", help="The size of a free dimension, or a range as in sequence=1..512.")
@click.option("--shape", "shapes", multiple=True, metavar="INPUT=1x3x224x224", help="The shape of an input.")
@click.option("--inputs", type=click.Path(exists=True, dir_okay=False), metavar="FILE.npz", help="Arrays by the names of the inputs.")
@click.option("--random-weights", is_flag=True, help="Random numbers in place of weights that the file computes from constants.")
@click.option("--outputs", multiple=True, metavar="NAME,NAME", help="The values to compute, which may be any in the graph.")
@click.option("--fallback", type=click.Choice(RUNTIMES), help="What runs operators that svod does not have.")
@click.option("--check", is_flag=True, help="Compare the outputs with onnxruntime, or with the reference where that is not installed.")
@click.option("--command", hidden=True, help="The command that error messages repeat, completed with the missing sizes.")
def cli(path: str, dims: Sequence[str], shapes: Sequence[str], inputs: str | None, random_weights: bool, outputs: Sequence[str],
        fallback: str | None, check: bool, command: str | None) -> None:
    """Run MODEL once.

    The exit status is 2 if the file or an option cannot be used, or if there is no memory for a size."""
    try:
        started = time.perf_counter()
        source: Any = with_random_weights(path) if random_weights else path
        model = load(source, dims=dimensions(dims), fallback=fallback, outputs=[n for o in outputs for n in o.split(",")] or None)
        several = {"--dim": dims, "--shape": shapes, "--inputs": [inputs] * bool(inputs), "--outputs": outputs,
                   "--fallback": [fallback] * bool(fallback)}
        given = [w for name, values in several.items() for v in values for w in (name, str(v))] + ["--random-weights"] * random_weights
        feed = make_feed(model, shapes_of(shapes), arrays_in(inputs) if inputs else {},
                         shlex.split(command) if command else ["svod-tune", path, *given])
        results = model(feed)
        kernels = sum(len(plan.kernels) for plan in model.plans)
        print(f"{path}: {kernels} kernel{'s' * (kernels != 1)}, loaded and run in {time.perf_counter() - started:.1f} s", flush=True)
        if check:
            print(difference(feed, results if isinstance(results, tuple) else (results,), model), flush=True)
    except (SvodError, OSError, MemoryError) as e:
        tell(f"svod: {e}")
        sys.exit(2)


def dimensions(texts: Sequence[str]) -> dict[str, int | Variable]:
    """Parse --dim for `load`. Raises OnnxError."""
    out: dict[str, int | Variable] = {}
    for text in texts:
        name, _, size = text.partition("=")
        low, dots, high = size.partition("..")
        if name in out:
            raise OnnxError(f"--dim {name} is given twice")
        if not name or not low.isdecimal() or (dots and not high.isdecimal()):
            raise OnnxError(f"--dim {text}: give a size or a range, as in --dim sequence=128 or --dim sequence=1..512")
        if dots and int(low) >= int(high):
            raise OnnxError(f"--dim {text}: a range ends above its beginning, as in --dim {name}=1..512; one size is --dim {name}={low}")
        identifier = "".join(c if c.isalnum() else "_" for c in name)
        out[name] = Variable(identifier if identifier[:1].isalpha() else f"d_{identifier}", int(low), int(high)) if dots else int(low)
    return out


def arrays_in(path: str) -> dict[str, Array]:
    """Read the file of --inputs: the arrays of a .npz file by name. Raises OnnxError."""
    how = "make one with numpy.savez('inputs.npz', **{'x': array}), where x is the name of an input"
    try:
        if not zipfile.is_zipfile(path):
            raise OnnxError(f"--inputs {path}: this is no whole .npz file; {how}")
        with np.load(path) as file:
            return {name: _array_in(file, name, path) for name in file.files}
    except (OSError, zipfile.BadZipFile) as e:
        raise OnnxError(f"--inputs {path}: the file cannot be read ({e}); {how}") from None


def _array_in(file: np.lib.npyio.NpzFile, name: str, path: str) -> Array:
    """An array of a .npz file. Raises OnnxError."""
    try:
        found = file[name]
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile):      # ValueError: NumPy does not unpickle objects
        raise OnnxError(f"--inputs {path}: {name} is damaged, or an array of Python objects; store numbers, as in "
                        f"numpy.savez('inputs.npz', **{{{name!r}: array.astype('float32')}})") from None
    if not isinstance(found, np.ndarray):
        raise OnnxError(f"--inputs {path}: {name} is no array; store only arrays, by the names of inputs")
    return found


def shapes_of(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse --shape: the shape of each input by name. Raises OnnxError."""
    out = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        parts = sizes.replace(",", "x").split("x")
        if not equals or not all(p.isdecimal() for p in parts):
            raise OnnxError(f"--shape {text}: give the input and its extents, as in --shape x=1x3x224x224")
        out[name] = tuple(int(p) for p in parts)
    return out


def make_feed(model: Model, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Array],
              command: Sequence[str]) -> dict[str, Array]:
    """Make inputs for a run: the given arrays, else small numbers of the declared types. A free dimension has the size with which the
    model was loaded, else the size in a given shape or array. Raises OnnxError for dimensions without a size, with a command to paste:
    `command` and example sizes."""
    known = {i.name for i in model.inputs}
    for option, named in (("--shape", shapes), ("--inputs", given)):
        if unknown := sorted(named.keys() - known):
            raise OnnxError(f"{option}: the model has no input {', '.join(unknown)}; use the names of its inputs: "
                            f"{', '.join(sorted(known))}")
    if twice := sorted(shapes.keys() & given.keys()):
        raise OnnxError(f"--shape and --inputs both give {', '.join(twice)}")
    told = {**{name: a.shape for name, a in given.items()}, **shapes}
    sizes = _told_sizes(model, told)
    wanted = {i.name: told.get(i.name) or tuple(_size_of(n, axis, sizes) for axis, n in enumerate(i.shape or ())) for i in model.inputs}
    if any(None in shape for shape in wanted.values()):
        raise OnnxError(_sizes_wanted(model, wanted, command))
    rng = np.random.default_rng(0)
    return {i.name: given[i.name] if i.name in given else _numbers(i, tuple(n or 0 for n in wanted[i.name]), rng) for i in model.inputs}


def _told_sizes(model: Model, told: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The sizes of named dimensions, from loading the model or from the shapes of inputs."""
    sizes: dict[str, int] = {name: n.expr.arg[2] if isinstance(n, Variable) else n for name, n in model.dims.items()}
    for i in model.inputs:
        for name, n in zip(i.shape or (), told.get(i.name, ()), strict=False):
            if isinstance(name, str):
                sizes.setdefault(name, n)
    return sizes


def _size_of(n: int | str | None, axis: int, sizes: Mapping[str, int]) -> int | None:
    """The size of an axis; None if it was not given. A batch axis has size 1."""
    if isinstance(n, int):
        return n
    if n is not None and n in sizes:
        return sizes[n]
    return 1 if axis == 0 and (n is None or n.lower() in BATCH_NAMES or n.lower().startswith(("batch", "unk__"))) else None


def _sizes_wanted(model: Model, shapes: Mapping[str, tuple[int | None, ...]], command: Sequence[str]) -> str:
    """The message about dimensions without a size, which are None in `shapes`: it lists the inputs and a command to paste."""
    free: dict[str, None] = {}      # names without a size
    nameless: dict[str, str] = {}   # inputs with an axis that has neither a name nor a size, and a shape to give
    for i in model.inputs:
        axes = list(zip(i.shape or (), shapes[i.name], strict=False))
        free |= {n: None for n, size in axes if size is None and n is not None and isinstance(n, str)}
        if any(size is None and n is None for n, size in axes):
            nameless[i.name] = f"{i.name}=" + "x".join(str(size or 224) for _, size in axes)
    lacking = [*free, *(f"an axis of {name}" for name in nameless)]
    inputs = "; ".join(f"{i.name} {i.dtype}[{', '.join('?' if n is None else str(n) for n in i.shape or ())}]" for i in model.inputs)
    words = [*command, *(w for n in free for w in ("--dim", f"{n}=128")), *(w for n in nameless.values() for w in ("--shape", n))]
    ranges = f", or a range: {shlex.join(['--dim', f'{next(iter(free))}=1..512'])}" if free else ""
    return (f"{', '.join(lacking)} {'have' if len(lacking) > 1 else 'has'} no size; the inputs are {inputs}. "
            f"Give {'each a size' if len(lacking) > 1 else 'one'}: {shlex.join(words)}{ranges}")


def _numbers(i: Input, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    kind = np.dtype(i.dtype if i.dtype != "bfloat16" else "float32")
    if kind.kind == "f":
        return rng.standard_normal(shape).astype(kind)
    if kind.kind == "b" or "mask" in i.name.lower():
        return np.ones(shape, kind)
    return rng.integers(0, 2, shape).astype(kind)


def with_random_weights(path: str) -> onnx.ModelProto:
    """A copy of the model in which random weights replace floats that ConstantOfShape makes with known shapes; files without weights
    compute them that way. Raises OnnxError."""
    proto, arrays = read_model(path)
    model = arrays.whole(proto)
    known = {t.name: arrays.of(t) for t in model.graph.initializer}
    known |= {n.output[0]: arrays.of(n.attribute[0].t) for n in model.graph.node
              if n.op_type == "Constant" and n.attribute and n.attribute[0].name == "value"}
    rng, kept = np.random.default_rng(0), []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in known and _makes_floats(node):
            shape = tuple(int(n) for n in known[node.input[0]])
            fan = max(1, int(np.prod(shape[1:])))
            values = rng.standard_normal(shape) / np.sqrt(fan) if len(shape) > 1 else rng.uniform(0.5, 1.0, shape)
            model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), node.output[0]))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _makes_floats(node: onnx.NodeProto) -> bool:
    """Whether a ConstantOfShape makes float32 numbers."""
    return all(a.t.data_type == onnx.TensorProto.FLOAT for a in node.attribute if a.name == "value")


def difference(feed: Mapping[str, Array], outputs: Sequence[Array], model: Model) -> str:
    """A sentence with the largest difference to another runtime, relative to the largest output, or with the reason for no comparison."""
    runtime = RUNTIMES[0] if find_spec(RUNTIMES[0]) is not None else RUNTIMES[1]
    weights = sum(int(np.prod(t.dims)) for t in model.proto.graph.initializer)
    if runtime == "reference" and weights > MANY_WEIGHTS:
        return "not compared: onnxruntime is not installed, and the reference of the onnx package would take too long"
    name = f"onnxruntime {version('onnxruntime')}" if runtime == "onnxruntime" else "the reference of the onnx package"
    names = [o.name for o in model.outputs]
    try:
        theirs = values_of(model.walk.arrays.whole(model.proto), names, feed, runtime)
    except Exception as e:  # each runtime has its own error types, and lacks operators that svod has
        return f"not compared: {name} does not run the model: {e}"
    worst = max((relative_difference(a, theirs[n]) for n, a in zip(names, outputs, strict=True)), default=0.0)
    return f"largest difference to {name}: {worst:.1e} of the largest output"


if __name__ == "__main__":
    cli()
