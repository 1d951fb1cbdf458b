"""Whitened patches: decorrelated by a fixed matrix from training images (Dual PatchNorm, appendix A)."""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms.contract import Device, Dtype, check, norm_kind
from vitmods.ops.context import upcast, without_autocast


class NotFittedWarning(UserWarning):
    """The whitening was not computed from images before training."""


@norm_kind(
    "whiten",
    title="whitening",
    paper="Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023, appendix A",
    url="https://openreview.net/forum?id=jgMqve6Qhw",
    how="the values of a patch are decorrelated by a fixed matrix from training images",
    published="whitened patches by themselves can lose, a LayerNorm of the patches is enough (appendix A)",
    replaces=False,
    macs=lambda grid, width, dense: grid[0] * grid[1] * width**2,
)
class Whitening(nn.Module):
    """``y = V (L + floor mean(L) + eps)^(-1/2) V^T (x - mean)`` for the covariance V L V^T of x over training images.

    This is ZCA whitening: of all matrices that decorrelate, the one that changes x least, so that a whitened patch
    still looks like one. Mean and matrix are buffers, zero and the identity until ``fit`` computes them; they are not
    trained. The appendix does not give a formula: kind and ``floor`` are ours.

    Shapes: (..., C) in and out, in the input's type; the product is in float32 at least.

    Args:
        dim: values C of a patch.
        eps: added to each variance.
        norm: a LayerNorm with gain and shift behind, as in the authors' prototype.
        floor: a fraction of the mean variance that is added to each: fine detail has hardly any, and would become
            noise.
    """

    token_wise = image_wise = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        norm: bool = False,
        floor: float = 1e-3,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        check("Whitening", eps)
        self.dim, self.eps, self.floor = dim, eps, floor
        self.register_buffer("mean", torch.zeros(dim, device=device, dtype=dtype))
        self.register_buffer("matrix", torch.eye(dim, device=device, dtype=dtype))
        self.register_buffer("patches", torch.zeros((), dtype=torch.int64, device=device))
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if norm else None
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if norm else None
        self._warned = False

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    @property
    def fitted(self) -> bool:
        """Whether ``fit`` was called, in this process or before the weights were saved."""
        return bool(self.patches > 0)  # type: ignore[operator]

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Mean and matrix from patches (..., C) of training images; in float64, in the order given. ValueError for
        fewer than two patches."""
        count, first, second = 0, torch.zeros(self.dim).double(), torch.zeros(self.dim, self.dim).double()
        shift: Tensor | None = None
        for batch in batches:
            rows = batch.detach().reshape(-1, self.dim).double().cpu()
            shift = rows.mean(0) if shift is None else shift  # so that no digits are lost to a large mean
            rows = rows - shift
            count, first, second = count + len(rows), first + rows.sum(0), second + rows.T @ rows
        if count < 2 or shift is None:
            raise ValueError(f"Whitening needs two patches at least, got {count}.")
        moved = first / count
        variances, directions = torch.linalg.eigh(second / count - torch.outer(moved, moved))
        variances = variances.clamp_min(0)
        scale = (variances + self.floor * variances.mean() + self.eps).rsqrt()
        self.get_buffer("mean").copy_(shift + moved)
        self.get_buffer("matrix").copy_(directions * scale @ directions.T)
        self.get_buffer("patches").fill_(count)
        self._warned = True  # there is nothing to warn of, and to look would wait for the device

    def forward(self, x: Tensor) -> Tensor:
        self._warn()
        with without_autocast(x):
            whitened = (upcast(x) - upcast(self.get_buffer("mean"))) @ upcast(self.get_buffer("matrix"))
            if self.weight is not None and self.bias is not None:
                whitened = F.layer_norm(whitened, (self.dim,), upcast(self.weight), upcast(self.bias), self.eps)
            return whitened.to(x.dtype)

    def _warn(self) -> None:
        if not self.training or self._warned or torch.compiler.is_compiling():
            return
        self._warned = True
        if not self.fitted:
            warnings.warn(
                "The whitening of patches was not computed and leaves them as they are: call "
                "model.patch_embed.fit(images) with training images first, as trials do.",
                NotFittedWarning,
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, floor={self.floor}, norm={self.weight is not None}"
