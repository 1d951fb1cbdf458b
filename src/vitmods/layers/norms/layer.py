"""Layer normalization over the channels of each token (Ba, Kiros & Hinton, 2016), and its learnable half by itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms.contract import Device, Dtype, check, dtn_table, norm_kind
from vitmods.ops.context import upcast


@norm_kind(
    "layer",
    title="LayerNorm",
    shorts=("layernorm",),
    paper="Ba, Kiros & Hinton: Layer Normalization. 2016",
    url="https://arxiv.org/abs/1607.06450",
    how="statistics over the channels of a token",
    published=dtn_table(79.9, 80.6),
    folds=True,
)
class LayerNorm(nn.LayerNorm):
    r"""Normalizes over the last dimension, with the biased variance.

    .. math:: y = \gamma \, \frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Statistics are in float32 whatever the input type
    (PyTorch accumulates in float32); the output has the input's type. Every token is normalized by itself.
    Raises ValueError on an eps that is not positive.
    """

    token_wise = image_wise = True

    def __init__(
        self, dim: int, eps: float = 1e-6, affine: bool = True, device: Device = None, dtype: Dtype = None
    ) -> None:
        check("LayerNorm", eps)
        super().__init__(dim, eps=eps, elementwise_affine=affine, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight is None and input.device.type == "cpu" and not torch.compiler.is_compiling():
            # PyTorch's CPU kernel is faster with ones and zeros than without them.
            weight, bias = input.new_ones(self.normalized_shape), input.new_zeros(self.normalized_shape)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps).to(input.dtype)


@norm_kind(
    "layer_centered",
    title="LayerNorm with a centered output",
    paper="Ba, Kiros & Hinton: Layer Normalization. 2016",
    url="https://arxiv.org/abs/1607.06450",
    how="LayerNorm, whose output has zero mean over the channels of a token whatever its gain",
    published="none: it is placed before the blocks of models that `norm(kind=rms)` converts exactly",
    replaces=False,
)
class CenteredLayerNorm(LayerNorm):
    """LayerNorm minus the mean over channels of its output, which an uneven gain makes nonzero.

    An RMSNorm behind it then computes what a LayerNorm would. Shapes and types as in ``LayerNorm``.
    """

    def forward(self, input: Tensor) -> Tensor:
        normalized = upcast(super().forward(input))
        return (normalized - normalized.mean(-1, keepdim=True)).to(input.dtype)


@norm_kind(
    "scale_shift",
    title="scale + shift",
    paper="Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023, Table 6",
    url="https://openreview.net/forum?id=jgMqve6Qhw",
    how="nothing is normalized: a gain and a shift for each channel",
    published="as both norms of Dual PatchNorm: its ablation without statistics (Table 6)",
    replaces=False,
)
class ScaleShift(nn.Module):
    r"""A gain and a shift for each channel (Kumar et al., Dual PatchNorm, 2023, Table 6).

    .. math:: y = \gamma x + \beta

    Shapes: (..., C) in and out; the output has the input's type. Nothing is normalized, so an eps is not needed.
    """

    token_wise = image_wise = True

    def __init__(self, dim: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x, self.weight).to(x.dtype)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
