"""PowerNorm: quadratic means of the batch that are steadied over time (Shen et al., 2020)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitmods.layers.norms.contract import RunningNorm, dtn_table, norm_kind, tokens, upcast, wide_type
from vitmods.layers.norms.rms import rms_backward, rms_forward, rms_norm, rms_quadratic_means
from vitmods.ops.moments import processes, sum_over_processes
from vitmods.util.errors import UserError

KEPT = 0.9  # weight of the past in both running means


class _PowerNorm(torch.autograd.Function):
    """``z = x' / sqrt(phi + eps)``, ``y = gamma z + beta`` over rows (B N, C), where x' is x, by groups divided by its
    root mean square. Backward follows the rule of the paper: ``a = g - (1 - 0.9) nu z`` with ``g = dy gamma``,
    ``nu += mean(a z)``, ``dx' = a / sqrt(phi_batch + eps)``; from x' to x it is the derivative. x alone is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        phi: Tensor,
        batch: Tensor,
        nu: Tensor,
        groups: int,
        eps: float,
    ) -> Tensor:
        ctx.eps, ctx.nu = eps, nu  # nu moves with every backward, also between this forward and its own
        y, rstd = rms_forward(x, weight * (phi + eps).rsqrt(), eps, bias, groups)
        ctx.save_for_backward(x, rstd, weight, phi, batch)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, rstd, weight, phi, (batch, mean) = ctx.saved_tensors
        inverse, batch_inverse = (phi + ctx.eps).rsqrt(), (batch + ctx.eps).rsqrt()
        pull = (1 - KEPT) * ctx.nu.to(phi.dtype)
        grad_x, sums, grad_bias = rms_backward(
            grad, x, weight * batch_inverse, rstd, pull * inverse * batch_inverse, shifted=True
        )
        grad_weight = sums * inverse
        along = sum_over_processes(weight * grad_weight / len(x)) / processes()
        ctx.nu.add_((along - pull * mean * inverse.square()).to(ctx.nu.dtype))
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


@norm_kind(
    "power",
    title="PowerNorm",
    shorts=("powernorm",),
    paper="Shen et al.: PowerNorm: Rethinking Batch Normalization in Transformers. ICML 2020",
    url="https://arxiv.org/abs/2003.07845",
    how="division by the quadratic mean over all tokens of the batch, steadied over time, for each channel",
    published=dtn_table(79.8, 80.4),
    lineup="norms",
    folds=True,
)
class PowerNorm(RunningNorm):
    """``y = gamma x / sqrt(phi + eps) + beta`` with phi the mean of x^2 over batch and tokens, for each channel.

    First every token is divided by its root mean square over the channels of each group (``groups``, 1 as in the
    paper's code, or the attention heads where ``num_heads`` is given, as in the code of Dynamic Token Normalization).
    For the first ``warmup`` training batches phi is the batch's own, afterwards the running one from before the batch;
    the gradient follows the paper's rule (see ``_PowerNorm``), which is not the derivative. Evaluation uses the running
    phi. State: ``running_phi``, ``ema_gz`` (nu of the rule), ``iters``.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Prefix tokens are counted as any other token. ``padding``
    (B, N), True for tokens that are filling, leaves those out of phi. Statistics are in float32 whatever the input
    type; the output has the input's type.

    Processes: when torch.distributed is initialized, phi and nu are means over all processes' batches (of one size).
    Gradient checkpointing is exact as long as one forward is followed by its backward. Warns once below 8 images.
    """

    takes = ("num_heads",)
    running_phi: Tensor
    ema_gz: Tensor
    iters: Tensor

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        warmup: int = 3000,
        groups: int | None = None,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype, groups=num_heads if groups is None else groups)
        if warmup < 0:
            raise UserError(f"PowerNorm(warmup=...) is a number of training batches, got {warmup}.")
        self.warmup = warmup
        self.register_buffer("running_phi", torch.ones(dim, device=device, dtype=wide_type(dtype)))
        self.register_buffer("ema_gz", torch.zeros(dim, device=device, dtype=wide_type(dtype)))
        self.register_buffer("iters", torch.zeros((), dtype=torch.long, device=device))
        self._before: tuple[Tensor, Tensor] | None = None  # phi and batch number of the last forward, to run it again

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        flat = tokens(x)
        self.warn_of_small_batches(flat.shape[0] * processes())
        rows = flat.flatten(0, 1)
        weight, bias = self._gain_and_shift(rows)
        if not self.training:
            scale = (self.running_phi.to(weight.dtype) + self.eps).rsqrt()
            return rms_norm(rows, weight * scale, self.eps, bias, self.groups).view_as(x)
        with torch.no_grad():
            batch = self._quadratic_means(rows, padding)
            phi = self._step(batch[0])
        y: Tensor = _PowerNorm.apply(rows, weight, bias, phi, batch, self.ema_gz, self.groups, self.eps)
        return y.view_as(x)

    def _gain_and_shift(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is None or self.bias is None:
            return upcast(rows).new_ones(self.dim), upcast(rows).new_zeros(self.dim)
        return upcast(self.weight), upcast(self.bias)

    def _quadratic_means(self, rows: Tensor, padding: Tensor | None) -> Tensor:
        """Means of x'^2 for each channel (2, C): over the tokens that are not padding, and over all."""
        if padding is None:
            mean = sum_over_processes(rms_quadratic_means(rows, self.groups, self.eps)) / processes()
            return torch.stack([mean, mean])
        squares = rms_forward(upcast(rows), None, self.eps, groups=self.groups)[0].square_()
        mean = sum_over_processes(squares.mean(0)) / processes()
        kept = (~padding).flatten().to(squares.dtype)
        return torch.stack([sum_over_processes(kept @ squares) / sum_over_processes(kept.sum()), mean])

    def _step(self, batch: Tensor) -> Tensor:
        """The phi to divide by, after counting this batch."""
        if self.gathers:
            self.iters.add_(1)
            before = self._before = (self.running_phi.clone(), self.iters.clone())
            phi = torch.where(self.iters < self.warmup, before[0] + (batch - before[0]) / self.iters, before[0])
            self.running_phi.copy_(KEPT * phi + (1 - KEPT) * batch)
        before = self._before or (self.running_phi, self.iters)
        return torch.where(before[1] <= self.warmup, batch, before[0].to(batch.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, warmup={self.warmup}"
