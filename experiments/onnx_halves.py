"""Errors of float16 ONNX files, of svod and of onnxruntime's CPU kernels, to the result in float64.

    python experiments/onnx_halves.py [--only PART]

First single operators over random operands of two magnitudes, beside the evaluator of the onnx package in float64. Then models with random
weights: PyTorch's exporter writes them in float32, their initialisers, constants and inputs become float16, and the module in float64 with
the same weights is the reference. An error is the norm of the difference over the norm of the reference; elements that are not finite
where the reference fits float16 are counted. Needs onnxruntime, PyTorch, torchvision and transformers. The status is 1 where svod's error
is more than 1 % above onnxruntime's: float32 itself moves a result across the middle of two floats of 16 bits now and then.
"""
from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import svod.onnx

H = np.float16
MOST = float(np.finfo(H).max)
RNG = np.random.default_rng(0)
X, ROWS, IMAGE, PAIR = (17, 64), (23, 200), (2, 8, 15, 13), ((17, 64), (17, 64))

# operator, opset, shapes of its float operands (arrays stay as they are), attributes
OPERATORS: list[tuple[str, int, tuple[Any, ...], dict[str, Any]]] = [
    *((name, 17, (X,), {}) for name in ("Sigmoid", "Tanh", "Exp", "Erf", "Softplus", "Softsign", "Elu", "Selu", "LeakyRelu", "HardSigmoid",
                                        "HardSwish", "Softmax", "LogSoftmax", "Reciprocal", "Sin", "Cos", "Relu", "Abs", "Atan")),
    ("Gelu", 20, (X,), {}), ("Gelu", 20, (X,), {"approximate": "tanh"}), ("Mish", 18, (X,), {}),
    *((name, 17, PAIR, {}) for name in ("Add", "Sub", "Mul", "Div")),
    ("Sum", 17, (X,) * 5, {}), ("Mean", 17, (X,) * 5, {}), ("Pow", 17, (X, np.array(2.0, H)), {}),
    *((f"Reduce{name}", 13, (ROWS,), {"axes": [1]}) for name in ("L1", "L2", "Mean", "SumSquare", "LogSumExp", "Max")),
    ("ReduceSum", 13, (ROWS, np.array([1])), {}), ("CumSum", 14, (ROWS, np.array(1)), {}),
    ("MatMul", 17, (ROWS, (200, 31)), {}), ("Gemm", 17, (ROWS, (200, 31), (31,)), {"alpha": 0.3, "beta": 0.7}),
    ("Einsum", 17, (ROWS, (200, 31)), {"equation": "ij,jk->ki"}),
    ("Conv", 17, (IMAGE, (12, 8, 3, 3), (12,)), {"pads": [1, 1, 1, 1]}), ("Conv", 17, (IMAGE, (8, 1, 3, 3), (8,)), {"group": 8}),
    ("ConvTranspose", 17, (IMAGE, (8, 6, 3, 3), (6,)), {"strides": [2, 2]}),
    ("AveragePool", 17, (IMAGE,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}), ("MaxPool", 17, (IMAGE,), {"kernel_shape": [3, 3]}),
    ("GlobalAveragePool", 17, (IMAGE,), {}), ("LpPool", 18, (IMAGE,), {"kernel_shape": [3, 3]}),
    ("BatchNormalization", 15, (IMAGE, (8,), (8,), (8,), np.linspace(0.5, 2, 8).astype(H)), {}),
    ("InstanceNormalization", 17, (IMAGE, (8,), (8,)), {}), ("LayerNormalization", 17, (ROWS, (200,), (200,)), {}),
    ("GroupNormalization", 21, (IMAGE, (8,), (8,)), {"num_groups": 4}), ("LpNormalization", 17, (ROWS,), {"axis": 1}),
    ("RMSNormalization", 23, (ROWS, (200,)), {}), ("Attention", 23, ((2, 4, 9, 16),) * 3, {}),
    ("Resize", 19, (IMAGE, np.zeros(0, H), np.array([1, 1, 1.7, 0.6], np.float32)), {"mode": "linear"}),
    ("GridSample", 20, (IMAGE, RNG.uniform(-1, 1, (2, 5, 6, 2)).astype(H)), {"padding_mode": "border"}),
    ("LSTM", 14, ((9, 3, 8), (1, 64, 8), (1, 64, 16), (1, 128)), {"hidden_size": 16}),
    ("GRU", 14, ((9, 3, 8), (1, 48, 8), (1, 48, 16), (1, 96)), {"hidden_size": 16}),
]


def norm_of(result: Any, reference: Any) -> tuple[float, int]:
    """The relative error over the elements that fit float16, and how many of these are not finite in the result."""
    fits = np.abs(reference) < MOST
    given, exact = result[fits].astype(np.float64), np.asarray(reference, np.float64)[fits]
    finite = np.isfinite(given)
    return float(np.linalg.norm((given - exact)[finite]) / np.linalg.norm(exact[finite])), int((~finite).sum())


def single(op: str, opset: int, operands: list[Any], attributes: dict[str, Any]) -> onnx.ModelProto:
    names = [f"i{k}" for k in range(len(operands))]
    kinds = [helper.np_dtype_to_tensor_dtype(o.dtype) for o in operands]
    inputs = [helper.make_tensor_value_info(k, kind, o.shape) for k, kind, o in zip(names, kinds, operands, strict=True)]
    output = helper.make_tensor_value_info("y", kinds[0], None)
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attributes)], "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def theirs(model: onnx.ModelProto, feed: dict[str, Any]) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]


def operators(only: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, reference, result of svod and result of onnxruntime of each operator, at both magnitudes."""
    for op, opset, shapes, attributes in OPERATORS:
        for scale in (1.0, 60.0):
            if only not in op:
                continue
            operands = [s if isinstance(s, np.ndarray) else (RNG.standard_normal(s) * (scale if k == 0 else 1)).astype(H)
                        for k, s in enumerate(shapes)]
            wide = [o.astype(np.float64) if o.dtype == H else o for o in operands]
            feed = {f"i{k}": o for k, o in enumerate(operands)}
            model = single(op, opset, operands, attributes)
            exact = ReferenceEvaluator(single(op, opset, wide, attributes)).run(None, {f"i{k}": o for k, o in enumerate(wide)})[0]
            how = " ".join(str(v) for v in attributes.values() if isinstance(v, str))
            yield f"{op} {how} ×{scale:.0f}".replace("  ", " "), exact, svod.onnx.load(model)(feed), theirs(model, feed)


def halved(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of float32 as one of float16: initialisers, constants, casts and inputs. Numbers beyond float16 become its largest."""
    def narrow(t: onnx.TensorProto) -> None:
        if t.data_type == TensorProto.FLOAT:
            t.CopyFrom(numpy_helper.from_array(np.clip(numpy_helper.to_array(t), -MOST, MOST).astype(H), t.name))
    for tensor in model.graph.initializer:
        narrow(tensor)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del model.graph.value_info[:]
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                narrow(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    return model


def models(only: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, reference, result of svod and result of onnxruntime of each model."""
    import torch

    from svod.bench.suites.torch_modules import REAL, make

    torch.manual_seed(0)
    resnet, _, _ = make("resnet18", REAL)
    from transformers import BertConfig, BertModel, WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    class Hidden(torch.nn.Module):
        """A module of transformers as a function of tensors."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *operands: Any) -> Any:
            return self.inner(*operands)[0]

    bert = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, attn_implementation="eager")
    whisper = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, attn_implementation="eager")
    tokens, mask = torch.randint(0, 30000, (2, 24)), torch.tensor([[1] * 24, [1] * 15 + [0] * 9])
    for name, module, args in (("MiniLM", Hidden(BertModel(bert)), (tokens, mask)), ("ResNet-18", resnet, (torch.randn(1, 3, 224, 224),)),
                               ("Whisper encoder", Hidden(WhisperEncoder(whisper)), (torch.randn(1, 80, 3000),))):
        if only not in name:
            continue
        module.eval().half().float()        # weights that float16 holds
        args = tuple(a.half().float() if a.is_floating_point() else a for a in args)
        data = io.BytesIO()
        names = [f"i{k}" for k in range(len(args))]
        torch.onnx.export(module, args, data, dynamo=False, opset_version=17, input_names=names, output_names=["y"])
        model = halved(onnx.load_from_string(data.getvalue()))
        feed = {k: a.numpy().astype(H) if a.is_floating_point() else a.numpy() for k, a in zip(names, args, strict=True)}
        with torch.inference_mode():
            exact = module.double()(*(a.double() if a.is_floating_point() else a for a in args)).numpy()
        yield name, exact, svod.onnx.load(model)(feed), theirs(model, feed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PART", help="operators and models with PART in their names")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    behind = []
    print("| | svod | onnxruntime | svod's share | not finite, svod | not finite, onnxruntime |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for source in (operators(only), models(only)):
        for name, exact, ours, other in source:
            (error, lost), (beside, lost_there) = norm_of(ours, exact), norm_of(other, exact)
            share = error / beside if beside else 1.0 if not error else np.inf
            print(f"| {name} | {error:.2e} | {beside:.2e} | {share:.3f} | {lost} | {lost_there} |", flush=True)
            if share > 1.01 or lost > lost_there:
                behind.append(name)
    print(f"\nbehind onnxruntime: {', '.join(behind) or 'none'}")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
