"""Functions of models without state, with PyTorch's names and arguments: `F.relu(x)` is `x.relu()`.

    import svod.nn.functional as F
    y = F.softmax(F.linear(x, weight, bias), dim=-1)

Each is the method of Tensor of the same name, whose docstring describes it. `dropout` raises UnsupportedError for `training=True`.
"""
from __future__ import annotations

from svod.tensor import Tensor

adaptive_avg_pool1d, adaptive_avg_pool2d = Tensor.adaptive_avg_pool1d, Tensor.adaptive_avg_pool2d
avg_pool1d, avg_pool2d, avg_pool3d = Tensor.avg_pool1d, Tensor.avg_pool2d, Tensor.avg_pool3d
max_pool1d, max_pool2d, max_pool3d = Tensor.max_pool1d, Tensor.max_pool2d, Tensor.max_pool3d
conv1d, conv2d, conv3d = Tensor.conv1d, Tensor.conv2d, Tensor.conv3d
conv_transpose1d, conv_transpose2d, conv_transpose3d = Tensor.conv_transpose1d, Tensor.conv_transpose2d, Tensor.conv_transpose3d
linear, embedding, one_hot = Tensor.linear, Tensor.embedding, Tensor.one_hot
scaled_dot_product_attention = Tensor.scaled_dot_product_attention
batch_norm, group_norm, instance_norm = Tensor.batch_norm, Tensor.group_norm, Tensor.instance_norm
layer_norm, rms_norm, normalize = Tensor.layer_norm, Tensor.rms_norm, Tensor.normalize
relu, relu6, leaky_relu, prelu, elu, selu, celu = (Tensor.relu, Tensor.relu6, Tensor.leaky_relu, Tensor.prelu, Tensor.elu, Tensor.selu,
                                                   Tensor.celu)
gelu, glu, silu, mish, sigmoid, tanh = Tensor.gelu, Tensor.glu, Tensor.silu, Tensor.mish, Tensor.sigmoid, Tensor.tanh
hardsigmoid, hardswish, hardtanh, hardshrink = Tensor.hardsigmoid, Tensor.hardswish, Tensor.hardtanh, Tensor.hardshrink
softmax, log_softmax, softplus, softshrink, softsign = (Tensor.softmax, Tensor.log_softmax, Tensor.softplus, Tensor.softshrink,
                                                        Tensor.softsign)
logsigmoid, tanhshrink, threshold = Tensor.logsigmoid, Tensor.tanhshrink, Tensor.threshold
cross_entropy, nll_loss, mse_loss, l1_loss = Tensor.cross_entropy, Tensor.nll_loss, Tensor.mse_loss, Tensor.l1_loss
smooth_l1_loss, huber_loss, kl_div = Tensor.smooth_l1_loss, Tensor.huber_loss, Tensor.kl_div
binary_cross_entropy, binary_cross_entropy_with_logits = Tensor.binary_cross_entropy, Tensor.binary_cross_entropy_with_logits
cosine_similarity, pairwise_distance = Tensor.cosine_similarity, Tensor.pairwise_distance
interpolate, pad, pixel_shuffle, pixel_unshuffle = Tensor.interpolate, Tensor.pad, Tensor.pixel_shuffle, Tensor.pixel_unshuffle
dropout = Tensor.dropout


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(name for name, value in globals().items() if callable(value) and value is not Tensor and name[0] != "_")
