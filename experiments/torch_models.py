"""Architectures that people have, run by torch.compile(backend="svod") and by PyTorch: are the numbers the same, in how many graphs, with
how many operations that PyTorch runs, and how long is a call.

    python -m experiments.torch_models                       every model of torchvision, transformers, and some of its own
    python -m experiments.torch_models resnet18 gpt2         some
    python -m experiments.torch_models --beam 4 --budget 60  kernels are searched first

Weights are random, models are made of configurations, and images and depths are small, so that all run in minutes. Times are medians
of a few calls, both in one process, and say little on a busy machine.
"""
from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# torchvision's wheel is built for CUDA: beside a CPU build of PyTorch its own operators do not load, and models do not need them
_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    try:
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        break

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]      # a module, and the arguments of a call
MODELS: dict[str, Callable[[], Made]] = {}


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    """A model of the table, by the name of its function."""
    MODELS[make.__name__] = make
    return make


def _image(size: int = 64, n: int = 1) -> Any:
    return torch.randn(n, 3, size, size)


def _vision(name: str, size: int = 64, **options: Any) -> None:
    def make() -> Made:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **options), (_image(size),), {}
    MODELS[name] = make


for _name in ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "swin_t", "densenet121",
              "squeezenet1_1", "shufflenet_v2_x0_5", "regnet_y_400mf", "mnasnet0_5", "vgg11"):
    _vision(_name)
_vision("googlenet", init_weights=True, aux_logits=False)


@model
def vit() -> Made:
    """A vision transformer of 4 layers."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, 4, 4, 128, 256), (_image(),), {}


@model
def detector_backbone() -> Made:
    """A ResNet with a feature pyramid."""
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None), (_image(96),), {}


@model
def segmentation() -> Made:
    """DeepLabV3 over a MobileNet."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    return deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None), (_image(96),), {}


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 200}


def _ids(length: int = 24, n: int = 1, vocabulary: int = 200) -> Any:
    return torch.randint(0, vocabulary, (n, length))


def _encoder(name: str, kind: str, config: str, **options: Any) -> None:
    def make() -> Made:
        import transformers

        made = getattr(transformers, kind)(getattr(transformers, config)(**options))
        ids = _ids()
        return made, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    MODELS[name] = make


def _decoder(name: str, kind: str, config: str, **options: Any) -> None:
    def make() -> Made:
        import transformers

        made = getattr(transformers, kind)(getattr(transformers, config)(**options))
        return made, (), {"input_ids": _ids(), "use_cache": False}
    MODELS[name] = make


_encoder("bert", "BertModel", "BertConfig", **_SMALL)
_encoder("roberta", "RobertaModel", "RobertaConfig", **_SMALL)
_encoder("electra", "ElectraModel", "ElectraConfig", **_SMALL)
_encoder("distilbert", "DistilBertModel", "DistilBertConfig", dim=64, n_layers=2, n_heads=4, hidden_dim=128, vocab_size=200)
_encoder("albert", "AlbertModel", "AlbertConfig", embedding_size=32, **_SMALL)
_decoder("llama", "LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **_SMALL)
_decoder("mistral", "MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=16, **_SMALL)
_decoder("qwen2", "Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, **_SMALL)
_decoder("mamba", "MambaForCausalLM", "MambaConfig", hidden_size=64, num_hidden_layers=2, vocab_size=200, state_size=8)


@model
def gpt2() -> Made:
    """GPT-2 with a KV cache: a prompt, then ten tokens, each with the cache of those before. One graph for all lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _Decoding(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=200, n_positions=64))), (_ids(6),), {}


@model
def llama_static_cache() -> Made:
    """Llama with a cache of a fixed size, written in place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _Decoding(LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_SMALL)), fixed=32), (_ids(6),), {}


class _Decoding(torch.nn.Module):
    """Greedy decoding: `step` is what is compiled."""

    def __init__(self, causal: Any, fixed: int = 0) -> None:
        super().__init__()
        self.causal, self.fixed = causal, fixed
        self.step = causal

    def compiled(self, **options: Any) -> _Decoding:
        """The same loop over a compiled step."""
        other = _Decoding(self.causal, self.fixed)
        object.__setattr__(other, "__dict__", dict(other.__dict__))
        other._modules.pop("step", None)
        object.__setattr__(other, "step", torch.compile(self.causal, **options))
        return other.eval()

    def forward(self, ids: Any) -> Any:
        """The logits of each step, (steps, vocabulary)."""
        from transformers import DynamicCache, StaticCache

        cache = StaticCache(config=self.causal.config, max_cache_len=self.fixed) if self.fixed else DynamicCache(config=self.causal.config)
        logits = []
        position = torch.arange(ids.shape[1])
        for _ in range(10):
            out = self.step(input_ids=ids, past_key_values=cache, cache_position=position, use_cache=True)
            logits.append(out.logits[:, -1])
            ids, position = out.logits[:, -1:].argmax(-1), position[-1:] + 1
        return torch.cat(logits)


@model
def t5() -> Made:
    """T5, encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    made = T5ForConditionalGeneration(T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=200))
    return made, (), {"input_ids": _ids(), "decoder_input_ids": _ids(8), "use_cache": False}


@model
def whisper() -> Made:
    """Whisper: audio features to tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                           encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=50, vocab_size=200,
                           pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, max_target_positions=32)
    return WhisperForConditionalGeneration(config), (), {"input_features": torch.randn(1, 16, 100), "decoder_input_ids": _ids(8),
                                                         "use_cache": False}


@model
def clip() -> Made:
    """CLIP: images and texts."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(text_config={**_SMALL, "max_position_embeddings": 32, "eos_token_id": 199},
                        vision_config={**_SMALL, "image_size": 32, "patch_size": 8}, projection_dim=32)
    return CLIPModel(config), (), {"input_ids": _ids(12, 2), "pixel_values": torch.randn(2, 3, 32, 32)}


@model
def wav2vec2() -> Made:
    """Wav2Vec2: sound."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, conv_dim=(32,) * 7,
                            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)
    return Wav2Vec2Model(config), (torch.randn(1, 4000),), {}


@model
def lstm() -> Made:
    """Two layers of LSTM. Dynamo leaves nn.LSTM to PyTorch."""
    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm = torch.nn.Embedding(200, 32), torch.nn.LSTM(32, 32, 2, batch_first=True)
            self.out = torch.nn.Linear(32, 10)

        def forward(self, ids: Any) -> Any:
            return self.out(self.lstm(self.embedding(ids))[0])
    return Tagger(), (_ids(),), {}


@model
def unet() -> Made:
    """A U-Net with transposed convolutions and group norm."""
    def block(a: int, b: int) -> Any:
        return torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.GroupNorm(4, b), torch.nn.SiLU())

    class UNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.deep, self.up = block(3, 16), block(16, 32), torch.nn.ConvTranspose2d(32, 16, 2, 2)
            self.out = torch.nn.Conv2d(32, 3, 1)

        def forward(self, x: Any) -> Any:
            kept = self.down(x)
            deep = self.deep(torch.nn.functional.max_pool2d(kept, 2))
            return self.out(torch.cat([kept, self.up(deep)], 1))
    return UNet(), (_image(32),), {}


@model
def mel_spectrogram() -> Made:
    """A classifier of sound over a spectrogram: complex numbers stay in PyTorch."""
    class Audio(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv1d(129, 32, 3, padding=1)
            self.register_buffer("window", torch.hann_window(256))

        def forward(self, x: Any) -> Any:
            spectrum = torch.stft(x, 256, window=self.window, return_complex=True).abs()
            return self.conv((spectrum + 1e-6).log()).relu().mean(-1)
    return Audio(), (torch.randn(1, 8000),), {}


# -- one model ------------------------------------------------------------------------------------------

def measure(name: str, options: dict[str, Any], calls: int) -> dict[str, Any]:
    """The row of a model."""
    import svod.torch
    from svod.torch.functions import functions

    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()
    before = set(functions)
    module, args, kwargs = MODELS[name]()
    module.eval()
    for p in module.parameters():
        if not p.any():     # what is initialised with zeros hides what stands before it
            torch.nn.init.normal_(p, std=0.05)
    torch._dynamo.utils.counters.clear()
    start = time.perf_counter()
    if isinstance(module, _Decoding):
        compiled = module.compiled(backend="svod", options=options)
    else:
        compiled = torch.compile(module, backend="svod", options=options)
    with torch.inference_mode():
        expected = module(*args, **kwargs)
        start = time.perf_counter()
        got = compiled(*args, **kwargs)
        first = time.perf_counter() - start
        error = difference(got, expected)
        error = max(error, difference(compiled(*args, **kwargs), expected))
        eager, mine = (seconds_of(lambda f=f: f(*args, **kwargs), calls) for f in (module, compiled))
    graphs = [g for g in svod.torch.report().graphs if g.function not in before]
    return {"model": name, "error": error, "graphs": len(graphs), "operations": sum(g.operations for g in graphs),
            "in PyTorch": sorted({m.name for g in graphs for m in g.missing}) + sorted({r for g in graphs for r in g.refused}),
            "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
            "plans": sum(g.plans for g in graphs), "first": first, "eager": eager, "svod": mine}


def difference(got: Any, expected: Any) -> float:
    """The largest difference of any output, relative to its largest element."""
    worst = 0.0
    pairs = list(zip(torch.utils._pytree.tree_leaves(_plain(got)), torch.utils._pytree.tree_leaves(_plain(expected)), strict=True))
    for a, b in pairs:
        if isinstance(b, torch.Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype
            if b.numel():
                worst = max(worst, ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item())
    return worst


def _plain(value: Any) -> Any:
    """Outputs of transformers as tuples."""
    return [v for v in value.to_tuple() if isinstance(v, torch.Tensor)] if hasattr(value, "to_tuple") else value


def seconds_of(call: Callable[[], Any], calls: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--beam", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--json")
    given = parser.parse_args()
    logging.getLogger("svod.torch").setLevel(logging.ERROR)
    options = {"beam": given.beam, "budget": given.budget} if given.beam else {}
    rows, failed = [], 0
    print("| model | difference | graphs | operations | in PyTorch | plans | first call s | eager ms | svod ms |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in given.models or MODELS:
        try:
            row = measure(name, options, given.calls)
        except Exception as error:      # a model that does not run is a row too
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} | | | | | | | |", flush=True)
            failed += 1
            continue
        rows.append(row)
        failed += row["error"] > 1e-3
        print(f"| {name} | {row['error']:.0e} | {row['graphs']} | {row['operations']} | {', '.join(row['in PyTorch']) or '-'} | "
              f"{row['plans']} | {row['first']:.1f} | {1e3 * row['eager']:.1f} | {1e3 * row['svod']:.1f} |", flush=True)
    print(f"\n{len(rows)} models, {sum(r['error'] <= 1e-3 for r in rows)} with the numbers of PyTorch, "
          f"{sum(not r['in PyTorch'] for r in rows)} without an operation that PyTorch runs")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
