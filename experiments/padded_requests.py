"""Measures requests to a classifier of text as a padded pipeline makes them: each has another batch and length.

    python experiments/padded_requests.py                    90 requests by svod, torch.compile(dynamic=True), without kept objects
    python experiments/padded_requests.py --backend eager

It prints the time of all, of the median and of the slowest request, the same for a second round, and the memory before and after.
"""
from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from typing import Any


def model_of(width: int, layers: int) -> Any:
    """BERT's encoder with random weights, and a classifier of the mean of the tokens."""
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = torch.nn.Embedding(30522, width), torch.nn.Embedding(512, width)
            self.norm = torch.nn.LayerNorm(width)
            layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.last = torch.nn.Linear(width, 3)

        def forward(self, ids: Any, mask: Any) -> Any:
            x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
            x = self.encoder(x, src_key_padding_mask=mask == 0)
            weight = mask[..., None].float()
            return self.last((x * weight).sum(1) / weight.sum(1))
    torch.manual_seed(0)
    return Classifier().eval()


def requests_of(count: int) -> list[tuple[Any, Any]]:
    """Requests of batch 1 to 4 and length 10 to 199."""
    import torch
    rng = random.Random(0)
    made = []
    for _ in range(count):
        batch, length = rng.randint(1, 4), rng.randint(10, 199)
        lengths = torch.tensor([length, *(rng.randint(5, length) for _ in range(batch - 1))])
        made.append((torch.randint(0, 30522, (batch, length)), (torch.arange(length) < lengths[:, None]).long()))
    return made


def resident_megabytes() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="svod", help="svod, inductor or eager")
    parser.add_argument("--count", type=int, default=90)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SVOD_OBJECT_CACHE", folder)
        import torch
        model, requests = model_of(256, 2), requests_of(options.count)
        run = torch.compile(model, backend=options.backend, dynamic=True) if options.backend != "eager" else model
        print(f"before: {resident_megabytes():.0f} MB")
        with torch.inference_mode():
            for name in ("first round", "second round"):
                seconds, worst = [], 0.0
                for request in requests:
                    start = time.perf_counter()
                    got = run(*request)
                    seconds.append(time.perf_counter() - start)
                    if len(seconds) % 10 == 0:
                        worst = max(worst, float((got - model(*request)).abs().max()))
                print(f"{name}: {sum(seconds):.1f} s, median {1e3 * statistics.median(seconds):.1f} ms, most {max(seconds):.2f} s; "
                      f"{resident_megabytes():.0f} MB; differs from eager by at most {worst:.1e}")
        if options.backend == "svod":
            import svod.torch
            print(svod.torch.report())


if __name__ == "__main__":
    main()
