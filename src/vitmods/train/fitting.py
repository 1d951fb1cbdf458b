"""What a model computes from training images before the first step."""

from typing import Any

from torch import nn

from vitmods.layers import DualPatchNormStem
from vitmods.train.loop import Images

IMAGES, BATCH = 1000, 50


def fit_to_images(model: nn.Module, ds: Images) -> dict[str, Any]:
    """Compute the whitening of patches where a model has one that was not computed yet, from up to 1,000 training
    images, evenly spread over the split, as evaluation sees them.

    No random number is drawn, so a trial that is taken up again gets the same. Returns what to record: module ->
    number of images; empty where nothing was to be done.
    """
    found: dict[str, Any] = {}
    for name, stem in model.named_modules():
        if isinstance(stem, DualPatchNormStem) and stem.waits_for_images:
            stem.fit(ds.plain_images("train", IMAGES, BATCH))
            found[name] = min(IMAGES, len(ds.splits["train"]))
    return {"fitted_to_images": found} if found else {}
