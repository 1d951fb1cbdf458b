"""The scales of the norm before the patch projection, as images (Dual PatchNorm, Figure 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitmods.analysis.figure import Arrays, Examined, NotHere, blank, clipped, figure_kind, show_mosaic
from vitmods.layers import DualPatchNormStem
from vitmods.model.vit import ViT
from vitmods.report.figures import MUTED

CHANNELS = {1: ("gray",), 3: ("red", "green", "blue")}


def first_norm_scales(model: ViT) -> Tensor:
    """The gain of each value of a patch, (channels, rows, columns) of a patch of any size.

    Raises:
        NotHere: the model has no norm on the pixels of a patch, or it learns no gain.
    """
    stem = model.patch_embed
    weight = getattr(stem.norm_before, "weight", None) if isinstance(stem, DualPatchNormStem) else None
    if weight is None:
        raise NotHere("it has no norm on the pixels of a patch that learns scales: apply dpn.")
    found: Tensor = weight.detach().float().cpu().unflatten(0, (stem.in_chans, *stem.patch_size))
    return found


def _scales(one: Examined) -> Arrays:
    scales = first_norm_scales(one.vit)
    names = CHANNELS.get(len(scales), [str(i + 1) for i in range(len(scales))])
    return dict(zip(names, scales))


@figure_kind(
    "first_norm",
    each=_scales,
    title="Scales of the first norm",
    source="Dual PatchNorm, Figure 3",
    needs="weights",
    columns=("channel", "row", "column", "scale"),
    see="The scale that the norm on the pixels of a patch has learned for each pixel, an image a color channel; "
    "each has a scale of colors of its own, since channels differ in size. In the paper the centers and the "
    "corners of patches are weighted up.",
)
def draw_first_norm(found: Mapping[str, Arrays]) -> Any:
    """A row of images a model; the range of a channel stands below it."""
    most = max(map(len, found.values()))
    drawn = blank(40 + 190 * most, 250 * len(found))
    grid = drawn.subplots(len(found), most, squeeze=False)
    for row, (name, channels) in zip(grid, found.items(), strict=True):
        for axes in row[len(channels) :]:
            axes.set_visible(False)
        for axes, (channel, scales) in zip(row, channels.items()):
            low, high = float(scales.min()), float(scales.max())
            flat = high - low < 1e-9
            show_mosaic(axes, [scales[None]], [], [], **({"vmin": low - 1, "vmax": low + 1} if flat else {}))
            title = f"{clipped(name)}: {channel}" if axes is row[0] else channel
            axes.set_title(title, color=MUTED, fontsize=11, loc="left", parse_math=False)
            axes.set_xlabel(f"{low:.3g}" if flat else f"{low:.3g} to {high:.3g}", color=MUTED, fontsize=11)
    return drawn
