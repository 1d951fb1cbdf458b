"""SUN397 from scratch: a medium data set on which plain training is far from enough."""

from vitmods.recipes.augreg import big_vision_views, of_big_vision
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe

SUN397_GRIDS: tuple[dict[str, tuple[float, ...]], ...] = (
    {"lr": (1e-3, 3e-4, 1e-4), "weight_decay": (0.03, 0.1), "dropout": (0.0, 0.1)},
    {"mixup": (0.0, 0.2, 0.5), "magnitude": (0, 5, 10, 15)},
)
"""arguments of `sun397` that the paper tries, all with all: first the plain ones, then augmentation with the best"""


@recipe(
    paper='Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 6.1 and appendix F',
    data="SUN397 at 224 px",
    expected=(
        "top-1 B/32 41.4 plain, 48.3 with augmentation, 52.5 for 600 epochs, B/16 45.6, 58.7, 60.8; with Dual "
        "PatchNorm 47.5, 50.7, 56.0 and 51.8, 63.0, 66.3"
    ),
    command=(
        "vitmods compare --data path/to/sun397 --base B/32 --img-size 224 --arms dpn --recipe "
        '"sun397(lr=1e-3,mixup=0.5,magnitude=15)"'
    ),
    not_stated=(
        "which point of the grids is best, the epochs of the first two rows, batch size, warm-up, loss. Here the "
        "batch is 512, the warm-up is that of Recipe, and the rest is AugReg's"
    ),
    model="B/32",
    architecture=of_big_vision,
)
def sun397(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    dropout: float = 0.0,
    mixup: float = 0.0,
    magnitude: int | None = None,
    *,
    epochs: int = 600,
    batch_size: int = 512,
) -> Recipe:
    """SUN397 from scratch: one point of the paper's two grids, `recipes.SUN397_GRIDS`.

    Args:
        lr: highest learning rate.
        weight_decay: multiplied by the learning rate, as everywhere here.
        dropout: of the model.
        mixup: alpha; 0: off.
        magnitude: of RandAugment's two operations; None: no RandAugment, which 0 is not.
        epochs: 600 in the last row.
        batch_size: images per step; the learning rate stays.
    """
    return big_vision_views().with_(
        epochs=epochs,
        batch_size=batch_size,
        moment="bfloat16",
        lr=lr,
        weight_decay=weight_decay,
        dropout=dropout,
        drop_path=0.0,
        init="big_vision",
        loss="sigmoid",
        randaugment=None if magnitude is None else (2, magnitude),
        randaugment_space="big_vision",
        mixup=mixup,
    )
