"""Where each kind of norm comes from, and what it gave in the published comparison."""

from dataclasses import dataclass

TABLE = "Dynamic Token Normalization, Table 3"


@dataclass(frozen=True)
class Kind:
    """``how`` it normalizes; ``top1`` its ViT-S and ViT-S* on ImageNet, where LayerNorm has 79.9 and 80.6."""

    title: str
    paper: str
    url: str
    how: str
    top1: tuple[float, float] | None = None

    @property
    def published(self) -> str:
        if self.top1 is None:
            return "none for ViTs; as part of Dual PatchNorm it loses 0.0 to 1.7 (Dual PatchNorm, Table 6)"
        small, star = self.top1
        gains = f"{small} ({small - 79.9:+.1f}) and {star} ({star - 80.6:+.1f})"
        return f"ImageNet-1k top-1 of S/16 and S*/16, with LayerNorm 79.9 and 80.6: {gains} ({TABLE})"


KINDS = {
    "layer": Kind(
        "LayerNorm",
        "Ba, Kiros & Hinton: Layer Normalization. 2016",
        "https://arxiv.org/abs/1607.06450",
        "statistics over the channels of a token",
        (79.9, 80.6),
    ),
    "rms": Kind(
        "RMSNorm",
        "Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019",
        "https://arxiv.org/abs/1910.07467",
        "a token is divided by the root mean square of its channels",
    ),
    "scale": Kind(
        "ScaleNorm",
        "Nguyen & Salazar: Transformers without Tears. IWSLT 2019",
        "https://arxiv.org/abs/1910.05895",
        "a token is divided by its length",
        (80.0, 80.6),
    ),
    "batch": Kind(
        "BatchNorm",
        "Ioffe & Szegedy: Batch Normalization. ICML 2015",
        "https://arxiv.org/abs/1502.03167",
        "statistics over all tokens of the batch, for each channel",
        (77.3, 77.2),
    ),
    "instance": Kind(
        "InstanceNorm",
        "Ulyanov, Vedaldi & Lempitsky: Instance Normalization. 2016",
        "https://arxiv.org/abs/1607.08022",
        "statistics over the tokens of an image, for each channel",
        (77.7, 77.6),
    ),
    "group": Kind(
        "GroupNorm",
        "Wu & He: Group Normalization. ECCV 2018",
        "https://arxiv.org/abs/1803.08494",
        "statistics over the tokens of an image and the channels of a head",
        (78.3, 79.5),
    ),
    "power": Kind(
        "PowerNorm",
        "Shen et al.: PowerNorm: Rethinking Batch Normalization in Transformers. ICML 2020",
        "https://arxiv.org/abs/2003.07845",
        "division by the quadratic mean over all tokens of the batch, steadied over time, for each channel",
        (79.8, 80.4),
    ),
    "switchable": Kind(
        "SwitchableNorm",
        "Luo et al.: Differentiable Learning-to-Normalize via Switchable Normalization. ICLR 2019",
        "https://arxiv.org/abs/1806.10779",
        "a learned mixture of instance, layer and batch statistics",
        (80.1, 81.0),
    ),
}
