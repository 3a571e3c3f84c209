"""The suite torch: architectures of torchvision and transformers, and a few of our own, with random weights.

    make(name, REAL)      a module, and the arguments of a call

REAL has images of 224² and realistic widths, but few layers: further layers would repeat the same kernels. SMALL runs in seconds. PyTorch
is imported when a module is made.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from svod.bench.suites.cases import Case, whole_model

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]      # a module, and the arguments of a call


class ModelScale(NamedTuple):
    """Sizes of models: pixels of an image; width, layers and heads of a transformer; size of its vocabulary; tokens of an input."""

    image: int
    width: int
    layers: int
    heads: int
    words: int
    tokens: int

    @property
    def transformer(self) -> dict[str, int]:
        """The options that configurations of transformers have in common."""
        return {"hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                "intermediate_size": 4 * self.width if self is REAL else 2 * self.width, "vocab_size": self.words}


REAL = ModelScale(224, 768, 2, 12, 8192, 128)
SMALL = ModelScale(64, 64, 2, 4, 200, 24)
MODULE_MAKERS: dict[str, Callable[[ModelScale], Made]] = {}
TITLES: dict[str, tuple[str, str]] = {}         # name of a model → its group and its title


def _model(group: str) -> Callable[[Callable[[ModelScale], Made]], Callable[[ModelScale], Made]]:
    """Register a model in the table under its function's name; the docstring is its title."""
    def note(function: Callable[[ModelScale], Made]) -> Callable[[ModelScale], Made]:
        MODULE_MAKERS[function.__name__] = function
        TITLES[function.__name__] = group, (function.__doc__ or "").rstrip(".")
        return function
    return note


def make(name: str, scale: ModelScale) -> Made:
    """A module in evaluation mode, and the arguments of a call. `torch.manual_seed` determines weights and inputs."""
    import torch

    _declare_operators(torch)
    module, args, kwargs = MODULE_MAKERS[name](scale)
    module.eval()
    for p in module.parameters():
        if not p.any():     # weights of zeros would hide errors in the layers before
            torch.nn.init.normal_(p, std=0.05)
    return module, args, kwargs


def _declare_operators(torch: Any) -> None:
    """Declare operators that torchvision expects when it is imported, although its models do not need them. Its wheel is built for CUDA:
    with a CPU build of PyTorch, the real operators do not load."""
    if not _declared:
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))      # lives as long as the process
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):        # raised if the operator is declared already
                _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declared: list[Any] = []


def torch_cases() -> tuple[Case, ...]:
    """A case for each model, at the scale REAL."""
    return tuple(whole_model(name, title, "torch", group, 1e-3) for name, (group, title) in TITLES.items())


def leaves(outputs: Any) -> list[Any]:
    """The tensors among outputs, in order. Outputs of the package transformers are converted to tuples first."""
    import torch

    plain = [v for v in outputs.to_tuple() if isinstance(v, torch.Tensor)] if hasattr(outputs, "to_tuple") else outputs
    return [t for t in torch.utils._pytree.tree_leaves(plain) if isinstance(t, torch.Tensor)]


def compiled(module: Any, **options: Any) -> Any:
    """Apply `torch.compile` to a module, or to the step of a decoding loop."""
    import torch

    return module.compiled(**options) if isinstance(module, Decoding) else torch.compile(module, **options)


# -- torchvision ----------------------------------------------------------------------------------------

def _image(size: int, n: int = 1) -> Any:
    import torch

    return torch.randn(n, 3, size, size)


def _vision(name: str, title: str, **options: Any) -> None:
    def build(scale: ModelScale) -> Made:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **options), (_image(scale.image),), {}
    MODULE_MAKERS[name], TITLES[name] = build, ("torchvision", title)


for _name, _title in (("resnet18", "ResNet-18"), ("resnet50", "ResNet-50"), ("mobilenet_v2", "MobileNet v2"),
                      ("mobilenet_v3_small", "MobileNet v3"), ("efficientnet_b0", "EfficientNet B0"), ("convnext_tiny", "ConvNeXt"),
                      ("swin_t", "Swin"), ("densenet121", "DenseNet-121"), ("squeezenet1_1", "SqueezeNet"),
                      ("shufflenet_v2_x0_5", "ShuffleNet v2"), ("regnet_y_400mf", "RegNet"), ("mnasnet0_5", "MnasNet"),
                      ("vgg11", "VGG-11"), ("vgg16", "VGG-16"), ("resnet34", "ResNet-34")):
    _vision(_name, _title)
_vision("googlenet", "GoogLeNet", init_weights=True, aux_logits=False)


@_model("torchvision")
def vit(scale: ModelScale) -> Made:
    """A vision transformer."""
    from torchvision.models import VisionTransformer

    width = max(128, scale.width)
    return VisionTransformer(scale.image, 16, 2 * scale.layers, scale.heads, width, 4 * width), (_image(scale.image),), {}


@_model("torchvision")
def detector_backbone(scale: ModelScale) -> Made:
    """A ResNet with a feature pyramid."""
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None), (_image(scale.image + 32),), {}


@_model("torchvision")
def segmentation(scale: ModelScale) -> Made:
    """DeepLabV3 over a MobileNet."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    return deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None), (_image(scale.image + 32),), {}


# -- transformers ---------------------------------------------------------------------------------------

def _ids(scale: ModelScale, length: int | None = None, n: int = 1) -> Any:
    import torch

    return torch.randint(0, scale.words, (n, length or scale.tokens))


Options = Callable[[ModelScale], dict[str, Any]]


def _encoder(name: str, title: str, kind: str, config: str, options: Options = lambda scale: {}, *, common: bool = True) -> None:
    def build(scale: ModelScale) -> Made:
        import torch
        import transformers

        made = getattr(transformers, kind)(getattr(transformers, config)(**(scale.transformer if common else {}), **options(scale)))
        ids = _ids(scale)
        return made, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    MODULE_MAKERS[name], TITLES[name] = build, ("transformers", title)


def _decoder(name: str, title: str, kind: str, config: str, options: Options) -> None:
    def build(scale: ModelScale) -> Made:
        import transformers

        made = getattr(transformers, kind)(getattr(transformers, config)(**options(scale)))
        return made, (), {"input_ids": _ids(scale), "use_cache": False}
    MODULE_MAKERS[name], TITLES[name] = build, ("transformers", title)


def _grouped(scale: ModelScale) -> dict[str, Any]:
    return {**scale.transformer, "num_key_value_heads": scale.heads // 2}


_encoder("bert", "BERT", "BertModel", "BertConfig")
_encoder("roberta", "RoBERTa", "RobertaModel", "RobertaConfig")
_encoder("electra", "ELECTRA", "ElectraModel", "ElectraConfig")
_encoder("distilbert", "DistilBERT", "DistilBertModel", "DistilBertConfig", lambda s: {
    "dim": s.width, "n_layers": s.layers, "n_heads": s.heads, "hidden_dim": s.transformer["intermediate_size"], "vocab_size": s.words},
    common=False)
_encoder("albert", "ALBERT", "AlbertModel", "AlbertConfig", lambda s: {"embedding_size": s.width // 2})
_decoder("llama", "Llama", "LlamaForCausalLM", "LlamaConfig", _grouped)
_decoder("mistral", "Mistral", "MistralForCausalLM", "MistralConfig", lambda s: {**_grouped(s), "sliding_window": 2 * s.tokens // 3})
_decoder("qwen2", "Qwen2", "Qwen2ForCausalLM", "Qwen2Config", _grouped)
_decoder("mamba", "Mamba", "MambaForCausalLM", "MambaConfig", lambda s: {
    "hidden_size": s.width, "num_hidden_layers": s.layers, "vocab_size": s.words, "state_size": 16 if s is REAL else 8})


@_model("transformers")
def gpt2(scale: ModelScale) -> Made:
    """GPT-2 with a KV cache: a prompt, then ten tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=scale.width, n_layer=scale.layers, n_head=scale.heads, vocab_size=scale.words, n_positions=2 * scale.tokens)
    return Decoding(GPT2LMHeadModel(config)), (_ids(scale, scale.tokens // 4),), {}


@_model("transformers")
def llama_static_cache(scale: ModelScale) -> Made:
    """Llama with a cache of a fixed size, written in place: a prompt, then ten tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Decoding(LlamaForCausalLM(LlamaConfig(**_grouped(scale))), 2 * scale.tokens), (_ids(scale, scale.tokens // 4),), {}


class Decoding:
    """Greedy decoding. `step` is the function to compile. `fixed`: the length of a cache that is written in place; 0: a growing cache."""

    def __init__(self, causal: Any, fixed: int = 0, step: Any = None) -> None:
        self.causal, self.fixed, self.step = causal, fixed, step if step is not None else causal

    def compiled(self, **options: Any) -> Decoding:
        """The same loop with a compiled step."""
        import torch

        return Decoding(self.causal, self.fixed, torch.compile(self.causal, **options))

    def eval(self) -> Decoding:
        """The model in evaluation mode."""
        self.causal.eval()
        return self

    def double(self) -> Decoding:
        """The model in float64."""
        self.causal.double()
        return self

    def parameters(self) -> Any:
        """The parameters of the wrapped model."""
        return self.causal.parameters()

    def __call__(self, ids: Any) -> Any:
        """The logits of each step, (steps, vocabulary)."""
        import torch
        from transformers import DynamicCache, StaticCache

        cache = StaticCache(config=self.causal.config, max_cache_len=self.fixed) if self.fixed else DynamicCache(config=self.causal.config)
        logits = []
        position = torch.arange(ids.shape[1])
        for _ in range(10):
            out = self.step(input_ids=ids, past_key_values=cache, cache_position=position, use_cache=True)
            logits.append(out.logits[:, -1])
            ids, position = out.logits[:, -1:].argmax(-1), position[-1:] + 1
        return torch.cat(logits)


@_model("transformers")
def t5(scale: ModelScale) -> Made:
    """T5, encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=scale.width, d_kv=scale.width // scale.heads, num_heads=scale.heads, num_layers=scale.layers,
                      d_ff=scale.transformer["intermediate_size"], vocab_size=scale.words)
    inputs = {"input_ids": _ids(scale), "decoder_input_ids": _ids(scale, scale.tokens // 3)}
    return T5ForConditionalGeneration(config), (), {**inputs, "use_cache": False}


@_model("transformers")
def whisper(scale: ModelScale) -> Made:
    """Whisper: audio features to tokens."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    bands, positions = (80, 500) if scale is REAL else (16, 50)
    ff = scale.transformer["intermediate_size"]
    config = WhisperConfig(d_model=scale.width, encoder_layers=scale.layers, decoder_layers=scale.layers, num_mel_bins=bands,
                           encoder_attention_heads=scale.heads, decoder_attention_heads=scale.heads, encoder_ffn_dim=ff,
                           decoder_ffn_dim=ff, max_source_positions=positions, vocab_size=scale.words, pad_token_id=0, bos_token_id=1,
                           eos_token_id=2, decoder_start_token_id=1, max_target_positions=2 * scale.tokens)
    return WhisperForConditionalGeneration(config), (), {"input_features": torch.randn(1, bands, 2 * positions), "use_cache": False,
                                                         "decoder_input_ids": _ids(scale, scale.tokens // 3)}


@_model("transformers")
def clip(scale: ModelScale) -> Made:
    """CLIP: images and texts."""
    from transformers import CLIPConfig, CLIPModel

    pixels, patch, length = (224, 32, 64) if scale is REAL else (32, 8, 12)
    config = CLIPConfig(text_config={**scale.transformer, "max_position_embeddings": 2 * length, "eos_token_id": scale.words - 1},
                        vision_config={**scale.transformer, "image_size": pixels, "patch_size": patch}, projection_dim=scale.width // 2)
    return CLIPModel(config), (), {"input_ids": _ids(scale, length, 2), "pixel_values": _image(pixels, 2)}


@_model("transformers")
def wav2vec2(scale: ModelScale) -> Made:
    """Wav2Vec2: sound."""
    import torch
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    channels, positions, groups, samples = (512, 128, 16, 16000) if scale is REAL else (32, 16, 4, 4000)
    config = Wav2Vec2Config(**{**scale.transformer, "vocab_size": 32}, conv_dim=(channels,) * 7, num_conv_pos_embeddings=positions,
                            num_conv_pos_embedding_groups=groups)
    return Wav2Vec2Model(config), (torch.randn(1, samples),), {}


# -- others ---------------------------------------------------------------------------------------------

@_model("others")
def lstm(scale: ModelScale) -> Made:
    """Two layers of LSTM."""
    import torch

    width = scale.width // 2

    class Tagger(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm = torch.nn.Embedding(scale.words, width), torch.nn.LSTM(width, width, 2, batch_first=True)
            self.out = torch.nn.Linear(width, 10)

        def forward(self, ids: Any) -> Any:
            return self.out(self.lstm(self.embedding(ids))[0])
    return Tagger(), (_ids(scale),), {}


@_model("others")
def unet(scale: ModelScale) -> Made:
    """A U-Net with transposed convolutions and group norm."""
    import torch

    width, size = (64, 128) if scale is REAL else (16, 32)

    def block(a: int, b: int) -> Any:
        return torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.GroupNorm(4, b), torch.nn.SiLU())

    class UNet(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.down, self.deep, self.up = block(3, width), block(width, 2 * width), torch.nn.ConvTranspose2d(2 * width, width, 2, 2)
            self.out = torch.nn.Conv2d(2 * width, 3, 1)

        def forward(self, x: Any) -> Any:
            kept = self.down(x)
            deep = self.deep(torch.nn.functional.max_pool2d(kept, 2))
            return self.out(torch.cat([kept, self.up(deep)], 1))
    return UNet(), (_image(size),), {}


def _convolutional(name: str, title: str, extra: int = 0) -> None:
    """Register a net of `convolutional_nets.py`. `extra`: pixels by which its images are larger than the scale's."""
    def build(scale: ModelScale) -> Made:
        from svod.bench.suites import convolutional_nets

        return getattr(convolutional_nets, name)(), (_image(scale.image + extra),), {}
    MODULE_MAKERS[name], TITLES[name] = build, ("others", title)


_convolutional("repvgg_a0", "RepVGG-A0")
_convolutional("yolov8n", "A detector like YOLOv8n", 96)
_convolutional("yolov3_tiny", "A detector like YOLOv3-tiny", 96)


@_model("others")
def mel_spectrogram(scale: ModelScale) -> Made:
    """A classifier of sound over a spectrogram."""
    import torch

    class Audio(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv1d(129, 32, 3, padding=1)
            self.register_buffer("window", torch.hann_window(256))

        def forward(self, x: Any) -> Any:
            spectrum = torch.stft(x, 256, window=self.window, return_complex=True).abs()
            return self.conv((spectrum + 1e-6).log()).relu().mean(-1)
    return Audio(), (torch.randn(1, 8000 if scale is SMALL else 32000),), {}
