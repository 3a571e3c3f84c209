"""Measures requests to a classifier of text as a padded pipeline makes them: each has another batch and length.

    python experiments/padded_requests.py                    90 requests by svod, torch.compile(dynamic=True), without kept objects
    python experiments/padded_requests.py --backend eager
    python experiments/padded_requests.py --onnx             the same by an ONNX file with two free dimensions, as Variables
    python experiments/padded_requests.py --onnx --backend onnxruntime

Batches are of 1 to 8, of 34 lengths. It prints the time of all, of the median and of the slowest request, the processor time that a size
takes beyond that of its second run, the same for a second round, and the memory before and after.
"""
from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BATCH, MOST_LENGTH, LENGTHS = 8, 200, 34


def model_of(width: int, layers: int) -> Any:
    """BERT's encoder with random weights, and a classifier of the mean of the tokens."""
    import torch
    from torch.nn import functional

    class Layer(torch.nn.Module):
        """A layer of BERT. torch.nn.TransformerEncoderLayer makes an ONNX file for one length."""

        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])

        def forward(self, x: Any, mask: Any) -> Any:
            q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in self.into(x).chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, mask[:, None, None] != 0)
            x = self.norms[0](x + self.out(y.transpose(1, 2).flatten(2)))
            return self.norms[1](x + self.down(functional.gelu(self.up(x))))

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = torch.nn.Embedding(30522, width), torch.nn.Embedding(512, width)
            self.norm = torch.nn.LayerNorm(width)
            self.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])
            self.last = torch.nn.Linear(width, 3)

        def forward(self, ids: Any, mask: Any) -> Any:
            x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
            for layer in self.layers:
                x = layer(x, mask)
            weight = mask[..., None].float()
            return self.last((x * weight).sum(1) / weight.sum(1))
    torch.manual_seed(0)
    return Classifier().eval()


def requests_of(count: int) -> list[tuple[Any, Any]]:
    """Requests of batch 1 to MOST_BATCH and of LENGTHS different lengths."""
    import torch
    rng = random.Random(0)
    lengths = rng.sample(range(10, MOST_LENGTH), LENGTHS)
    made = []
    for _ in range(count):
        batch, length = rng.randint(1, MOST_BATCH), rng.choice(lengths)
        tokens = torch.tensor([length, *(rng.randint(5, length) for _ in range(batch - 1))])
        made.append((torch.randint(0, 30522, (batch, length)), (torch.arange(length) < tokens[:, None]).long()))
    return made


def onnx_function(model: Any, example: tuple[Any, Any], folder: Path, backend: str) -> Callable[[Any, Any], Any]:
    """The model exported to an ONNX file with two free dimensions, as a function of tensors."""
    import torch

    path, axes = folder / "classifier.onnx", {0: "batch", 1: "length"}
    torch.onnx.export(model, example, str(path), input_names=["ids", "mask"], output_names=["scores"], opset_version=17, dynamo=False,
                      dynamic_axes={"ids": axes, "mask": axes, "scores": {0: "batch"}})
    if backend == "onnxruntime":
        import onnxruntime
        session = onnxruntime.InferenceSession(str(path))
        return lambda ids, mask: torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])
    from svod import Variable
    from svod.onnx import load
    loaded = load(path, dims={"batch": Variable("batch", 1, MOST_BATCH), "length": Variable("length", 1, MOST_LENGTH)})
    return lambda ids, mask: torch.from_numpy(loaded(ids.numpy(), mask.numpy()))


def resident_megabytes() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="svod", help="svod, inductor or eager; with --onnx: svod or onnxruntime")
    parser.add_argument("--onnx", action="store_true", help="run an ONNX file")
    parser.add_argument("--count", type=int, default=90)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SVOD_OBJECT_CACHE", folder)
        import torch
        model, requests = model_of(256, 2), requests_of(options.count)
        if options.onnx:
            run = onnx_function(model, requests[0], Path(folder), options.backend)
        else:
            run = torch.compile(model, backend=options.backend, dynamic=True) if options.backend != "eager" else model
        print(f"before: {resident_megabytes():.0f} MB")
        beyond: dict[tuple[int, int], float] = {}       # seconds of processor time
        with torch.inference_mode():
            for name in ("first round", "second round"):
                seconds, worst = [], 0.0
                for request in requests:
                    start, used = time.perf_counter(), time.process_time()
                    got = run(*request)
                    seconds.append(time.perf_counter() - start)
                    if (size := tuple(request[0].shape)) not in beyond:
                        first, used = time.process_time() - used, time.process_time()
                        run(*request)
                        beyond[size] = first - (time.process_time() - used)
                    if len(seconds) % 10 == 0:
                        worst = max(worst, float((got - model(*request)).abs().max()))
                print(f"{name}: {sum(seconds):.1f} s, median {1e3 * statistics.median(seconds):.1f} ms, most {max(seconds):.2f} s; "
                      f"{resident_megabytes():.0f} MB; differs from eager by at most {worst:.1e}")
        print(f"{len(beyond)} sizes take {1e3 * statistics.median(beyond.values()):.2f} ms beyond a run, the median of processor time")
        if options.backend == "svod" and not options.onnx:
            import svod.torch
            print(svod.torch.report())


if __name__ == "__main__":
    main()
