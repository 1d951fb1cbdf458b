"""PowerNorm: quadratic means of the batch that are steadied over time (Shen et al., 2020)."""

from typing import Any

import torch
from torch import Tensor

from vitmods.layers.norms.contract import (
    Device,
    Dtype,
    RunningNorm,
    dtn_table,
    norm_kind,
    processes,
    sum_over_processes,
)
from vitmods.ops.context import differentiates_again, upcast
from vitmods.ops.padding import padding_of
from vitmods.ops.rms import rms_norm
from vitmods.util.errors import UserError

DECAY = 0.9  # weight of the past in both running means


class _PowerNorm(torch.autograd.Function):
    """``z = x / sqrt(phi + eps)``, ``y = gamma z + beta`` over rows (B N, C). Backward follows the rule of the paper:
    ``a = g - (1 - 0.9) nu z`` with ``g = dy gamma``, ``nu += mean(a z)``, ``dx = a / sqrt(phi_batch + eps)``.

    ``statistics`` (3 or 4, C): 0, phi, phi_batch, which is of the rows that count, and last the mean of x^2 over all
    rows, for the mean of z^2. BatchNorm's kernels for fixed statistics, 0 and phi, make ``y``, and in backward a
    product and both sums, in one pass each."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        statistics: Tensor,
        nu: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.eps, ctx.nu = eps, nu  # nu moves with every backward, also between this forward and its own
        ctx.save_for_backward(x, weight, statistics)
        y, _, _ = torch.native_batch_norm(x, weight, bias, statistics[0], statistics[1], False, 0.0, eps)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if differentiates_again():
            raise UserError(
                "PowerNorm's gradient in training is its paper's rule and cannot be differentiated again: leave "
                "create_graph out, or use another norm."
            )
        x, weight, statistics = ctx.saved_tensors
        zero, phi, mean = statistics[0], statistics[1], statistics[-1]
        inverses = (statistics[1:3] + ctx.eps).rsqrt_()
        inverse, batch_inverse = inverses
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous(), x, weight * (batch_inverse / inverse), zero, phi, None, None, False, ctx.eps, [True] * 3
        )
        of_mean, of_x = ctx.nu.to(phi.dtype) * inverse * inverses
        grad_x.addcmul_(x, of_x, value=DECAY - 1)
        gain, along = weight.to(ctx.nu.dtype), grad_weight.to(ctx.nu.dtype)
        if processes() > 1:
            along = sum_over_processes(along) / processes()
        ctx.nu.addcmul_(gain, along, value=1 / len(x))
        ctx.nu.addcmul_(of_mean.to(ctx.nu.dtype), mean.to(ctx.nu.dtype), value=DECAY - 1)
        return grad_x, grad_weight, grad_bias, None, None, None


@norm_kind(
    "power",
    title="PowerNorm",
    shorts=("powernorm",),
    paper="Shen et al.: PowerNorm: Rethinking Batch Normalization in Transformers. ICML 2020",
    url="https://arxiv.org/abs/2003.07845",
    how="division by the quadratic mean over all tokens of the batch, steadied over time, for each channel",
    published=dtn_table(79.8, 80.4),
    folds=True,
)
class PowerNorm(RunningNorm):
    r"""Divides by the root of phi, the mean of x^2 over batch and tokens, for each channel.

    .. math:: y = \gamma \, \frac{x}{\sqrt{\phi + \epsilon}} + \beta

    First every token is divided by its root mean square over the channels of each group (``groups``, 1 as in the
    paper's code, or the attention heads where ``num_heads`` is given, as in the code of Dynamic Token Normalization).
    For the first ``warmup`` training batches phi is the batch's own, afterwards the running one from before the batch;
    the gradient follows the paper's rule (see ``_PowerNorm``), which is not the derivative. Evaluation uses the running
    phi. State: ``running_phi``, ``ema_gz`` (nu of the rule), ``iters``.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Prefix tokens are counted as any other token. ``padding``
    (B, N), True for tokens that are filling, leaves those out of phi (by default what ``vitmods.ops.padding`` says).
    Statistics are in float32 whatever the input type; the output has the input's type.

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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype)
        self.group(num_heads if groups is None else groups)
        if warmup < 0:
            raise UserError(f"PowerNorm(warmup=...) is a number of training batches, got {warmup}.")
        self.warmup = warmup
        self.run("running_phi", 1.0, device, dtype)
        self.run("ema_gz", 0.0, device, dtype)
        self.register_buffer("iters", torch.zeros((), dtype=torch.long, device=device))
        self._phi: Tensor | None = None  # of the last forward, to run it again

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        flat = self.tokens(x)
        padding = padding_of(self, flat) if padding is None else padding
        self.warn_of_small_batches(flat.shape[0] * processes())
        groups = torch.unflatten(upcast(flat).flatten(0, 1), -1, (self.groups, -1))
        rows = rms_norm(groups, None, self.eps).flatten(-2)
        weight = rows.new_ones(self.dim) if self.weight is None else upcast(self.weight)
        bias = rows.new_zeros(self.dim) if self.bias is None else upcast(self.bias)
        if not self.training:
            scale = (self.running_phi.to(rows.dtype) + self.eps).rsqrt()
            return torch.addcmul(bias, rows, weight * scale).to(x.dtype).view_as(x)
        if torch._C._are_functorch_transforms_active():
            raise UserError(
                "PowerNorm's gradient in training is its paper's rule, which torch.func does not support: call eval()."
            )
        with torch.no_grad():
            squares, kept = rows.square(), None if padding is None else (~padding).flatten().to(rows.dtype)
            statistics = rows.new_zeros(3 if kept is None else 4, self.dim)
            _, phi, batch, *_ = statistics
            mean = torch.mean(squares, 0, out=statistics[-1])
            if processes() > 1:
                mean.copy_(sum_over_processes(mean) / processes())
            if kept is not None:
                torch.div(sum_over_processes(kept @ squares), sum_over_processes(kept.sum()), out=batch)
            self._step(batch, phi)
        y: Tensor = _PowerNorm.apply(rows, weight, bias, statistics, self.ema_gz, self.eps)
        return y.to(x.dtype).view_as(x)

    def _step(self, batch: Tensor, out: Tensor) -> None:
        """Count this batch, and write the phi to divide by."""
        if not self.gathers and self._phi is not None:
            out.copy_(self._phi)
            return
        self.iters.add_(int(self.gathers))
        torch.where(self.iters <= self.warmup, batch, self.running_phi.to(batch.dtype), out=out)
        if self.gathers:
            self._phi, known = out, batch.to(self.running_phi.dtype)
            self.running_phi.lerp_(known, (self.iters < self.warmup) / self.iters).lerp_(known, 1 - DECAY)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, warmup={self.warmup}"
