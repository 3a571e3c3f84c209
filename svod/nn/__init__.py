"""Layers for inference with PyTorch's names, parameters and state dictionaries. `svod.nn.state` reads and writes weights.

    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(nn.state.load("model.safetensors"))
    y = model(x)                       # lazy, like every tensor operation
"""
from __future__ import annotations

from svod.nn import functional, state
from svod.nn.attention import MultiheadAttention
from svod.nn.convolutions import (
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from svod.nn.functions import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    Dropout,
    Flatten,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    Identity,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PixelShuffle,
    PixelUnshuffle,
    PReLU,
    ReflectionPad1d,
    ReflectionPad2d,
    ReLU,
    ReLU6,
    ReplicationPad1d,
    ReplicationPad2d,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
    Unflatten,
    Upsample,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
)
from svod.nn.linear import Embedding, Linear
from svod.nn.losses import BCELoss, BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, KLDivLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from svod.nn.module import Module, ModuleDict, ModuleList, Parameter, Sequential
from svod.nn.norms import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from svod.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from svod.nn.transformer import TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer

__all__ = ["CELU", "ELU", "GELU", "GLU", "GRU", "LSTM", "RNN", "SELU", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AvgPool1d", "AvgPool2d",
           "AvgPool3d", "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "ConstantPad1d", "ConstantPad2d",
           "ConstantPad3d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "CrossEntropyLoss",
           "Dropout", "Embedding", "Flatten", "GRUCell", "GroupNorm", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss",
           "Identity", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "KLDivLoss", "L1Loss", "LSTMCell", "LayerNorm", "LeakyReLU",
           "Linear", "LogSigmoid", "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d", "MaxPool3d", "Mish", "Module", "ModuleDict",
           "ModuleList", "MultiheadAttention", "NLLLoss", "PReLU", "Parameter", "PixelShuffle", "PixelUnshuffle", "RMSNorm", "RNNCell",
           "ReLU", "ReLU6", "ReflectionPad1d", "ReflectionPad2d", "ReplicationPad1d", "ReplicationPad2d", "Sequential", "SiLU", "Sigmoid",
           "SmoothL1Loss", "Softmax", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold", "TransformerDecoder",
           "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer", "Unflatten", "Upsample", "ZeroPad1d", "ZeroPad2d",
           "ZeroPad3d", "functional", "state"]


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
