"""Codes of patches, which a masked model predicts: clusters of their pixels, or of a frozen encoder's features."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.stems import patchify
from vitmods.model.vit import ViT
from vitmods.tasks.beit.recipes import BeitPart
from vitmods.util.errors import UserError

_EPS = 1e-6  # of the variance of a patch


class Codes(nn.Module):
    """The nearest of K centers for each patch, int64 (B, T); k-means fits the centers to training images.

    A patch is described by its pixels with mean 0 and variance 1, or by the encoder's features at length 1. Centers are
    saved with the task's modules; the encoder is not: `code_encoder` must stay where it is.
    """

    centers: Tensor

    def __init__(self, part: BeitPart, backbone: ViT) -> None:
        super().__init__()
        config = backbone.vit_config
        self.patch_size, width = config.patch_size, config.in_chans * config.patch_size[0] * config.patch_size[1]
        self._encoder: list[ViT] = []  # in a list: it is neither trained nor saved
        if part.code_encoder is not None:
            from vitmods.adapters.files import open_checkpoint

            encoder = open_checkpoint(part.code_encoder).requires_grad_(False).eval()
            if encoder.vit_config.grid != config.grid or encoder.vit_config.in_chans != config.in_chans:
                raise UserError(
                    f"{part.code_encoder} makes {encoder.vit_config.grid} patches of {encoder.vit_config.in_chans} "
                    f"channels, and the model {config.grid} of {config.in_chans}: choose an encoder with the same grid."
                )
            self._encoder, width = [encoder], encoder.vit_config.embed_dim
        self.register_buffer("centers", torch.zeros(part.codes, width))

    @property
    def waits_for_images(self) -> bool:
        """Whether `fit` has not computed the centers yet."""
        return not bool(self.centers.any())

    def describe(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> vectors (B, T, D) that are compared with the centers."""
        if self._encoder:
            encoder = self._encoder[0].to(images.device)
            tokens = encoder.forward_features(images)[:, encoder.num_prefix_tokens :]
            return F.normalize(tokens.float(), dim=-1)
        patches = patchify(images.float(), self.patch_size)
        centered = patches - patches.mean(dim=-1, keepdim=True)
        return centered / (centered.square().mean(dim=-1, keepdim=True) + _EPS).sqrt()

    @torch.no_grad()
    def fit(self, images: Iterable[Tensor]) -> None:
        """Compute the centers by mini-batch k-means, in the same bits each time. UserError for too few patches."""
        from sklearn.cluster import MiniBatchKMeans
        from threadpoolctl import threadpool_limits

        vectors = torch.cat([self.describe(batch).flatten(0, 1) for batch in images]).cpu().numpy()
        count = len(self.centers)
        if len(vectors) < count:
            raise UserError(
                f"{len(vectors):,} patches of training images cannot have {count:,} codes: set fewer codes."
            )
        k_means = MiniBatchKMeans(count, batch_size=max(4096, count), n_init=1, random_state=0)
        with threadpool_limits(1):  # sums of several threads differ in their last bits
            k_means.fit(vectors)
        self.centers.copy_(torch.from_numpy(k_means.cluster_centers_))

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            vectors = self.describe(images)
            half_squares = self.centers.square().sum(dim=1) / 2
            return (vectors @ self.centers.T - half_squares).argmax(dim=-1)
