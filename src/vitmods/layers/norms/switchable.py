"""Switchable normalization: a learned mixture of instance, layer and batch statistics (Luo et al., 2019)."""

import torch
from torch import Tensor, nn

from vitmods.layers.norms.contract import (
    Device,
    Dtype,
    RunningNorm,
    batch_moments,
    dtn_table,
    norm_kind,
    processes,
    unbiased,
)


@norm_kind(
    "switchable",
    title="SwitchableNorm",
    shorts=("switchnorm",),
    paper="Luo et al.: Differentiable Learning-to-Normalize via Switchable Normalization. ICLR 2019",
    url="https://arxiv.org/abs/1806.10779",
    how="a learned mixture of instance, layer and batch statistics",
    published=dtn_table(80.1, 81.0),
    least_tokens=2,
    folds=True,
)
class SwitchableNorm(RunningNorm):
    r"""Normalizes by learned mixtures of statistics, over k in instance, layer and, with ``batch``, batch.

    .. math::

        y = \gamma \, \frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta, \qquad
        \mathrm{mean} = \sum_k \mathrm{softmax}(w)_k \, \mathrm{mean}_k

    w is ``mean_weight``; the variances are mixed alike by ``var_weight``.

    Instance statistics are over the tokens of an image for each channel, with the unbiased variance; layer statistics
    over all tokens and channels of an image, batch statistics over all tokens of all images for each channel, both
    made from the instance ones: ``var_k = E_k[var_in + mean_in^2] - mean_k^2``. All mixtures start equal.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out, N at least 2 (else ValueError). Prefix tokens are counted as
    any other token. Statistics are in float32 whatever the input type; the output has the input's type. The batch
    branch gathers ``running_mean`` and ``running_var`` with weight ``momentum`` for the newest batch, and evaluation
    uses those.

    Processes: when torch.distributed is initialized, training takes the batch branch's statistics over the batches of
    all processes. Warns once below 8 images a batch, with the batch branch.
    """

    least = 2
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        batch: bool = True,
        momentum: float = 0.1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype)
        self.momentum, self.image_wise = momentum, not batch
        self.mean_weight = nn.Parameter(torch.ones(2 + batch, device=device, dtype=dtype))
        self.var_weight = nn.Parameter(torch.ones(2 + batch, device=device, dtype=dtype))
        for name, start in (("running_mean", 0.0), ("running_var", 1.0)):
            if batch:
                self.run(name, start, device, dtype)
            else:
                self.register_buffer(name, None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.mean_weight)
        nn.init.ones_(self.var_weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.running_mean is not None:
            self.warn_of_small_batches(x.shape[0] * processes())
        return super().forward(x)

    def statistics(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        var, center = unbiased(var, length), mean.mean(-1, keepdim=True)
        means, variances = [mean, center], [var, (var + (mean - center).square()).mean(-1, keepdim=True)]
        if self.running_mean is not None:
            batch_mean, batch_var = self._batch(mean, var, length)
            means.append(batch_mean)
            variances.append(batch_var)
        return _mix(self.mean_weight, means), _mix(self.var_weight, variances)

    def _batch(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        running_mean, running_var = self.running_mean, self.running_var
        assert running_mean is not None
        assert running_var is not None
        if not self.training:
            return running_mean.to(mean.dtype), running_var.to(var.dtype)
        mean, var, _ = batch_moments(mean, var, length)
        self.gather("running_mean", mean, self.momentum)
        self.gather("running_var", var, self.momentum)
        return mean, var

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, batch={self.running_mean is not None}"


def _mix(weight: Tensor, parts: list[Tensor]) -> Tensor:
    fractions = weight.to(parts[0].dtype).softmax(0)
    mixed = fractions[0] * parts[0]
    for fraction, part in zip(fractions[1:], parts[1:], strict=True):
        mixed = mixed + fraction * part
    return mixed
