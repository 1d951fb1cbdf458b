"""A stem of several convolutions on whole images: a norm after each, GELU between them."""

from collections.abc import Iterator

from torch import Tensor, nn

from vitmods.layers.stems.base import NormFactory, Stem


class ConvolutionStem(Stem):
    """``layers`` holds convolution, norm and GELU of each layer but the last, which are ``proj`` and ``norm``.

    ``convolutions`` are those of all layers, ``inner_norm`` makes the norms between them. Convolutions run with the
    channels last in memory, as the norms want them; on CPUs that is a tenth faster for the whole stem too.
    """

    proj: nn.Conv2d

    def _fill(
        self, convolutions: list[nn.Conv2d], inner_norm: NormFactory | None, norm_layer: NormFactory | None
    ) -> None:
        *first, last = convolutions
        self.layers = nn.Sequential()
        for conv in first:
            norm = inner_norm(conv.out_channels) if inner_norm else nn.Identity()
            self.layers.extend([conv, norm, nn.GELU()])
        self.proj = last
        self.norm = norm_layer(last.out_channels) if norm_layer else nn.Identity()
        self.first_layer = "layers.0" if first else "proj"

    def _steps(self) -> Iterator[tuple[nn.Module, ...]]:
        """(convolution, norm, GELU) of each layer but the last."""
        layers = list(self.layers)
        return zip(layers[::3], layers[1::3], layers[2::3], strict=True)

    def project(self, images: Tensor) -> Tensor:
        x = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # torch.vmap takes no memory_format
        for conv, norm, gelu in self._steps():
            x = gelu(norm(conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        tokens: Tensor = self.proj(x).permute(0, 2, 3, 1).flatten(1, 2)
        return tokens
