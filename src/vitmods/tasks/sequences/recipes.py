"""Long ListOps of Long Range Arena, with which Dynamic Token Normalization was compared on sequences."""

from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe

STEPS = 5_000


@recipe(
    paper='Tay et al., "Long Range Arena" (arXiv:2011.04006); used by Shao et al., "Dynamic Token Normalization", 4.2',
    data="Long ListOps: 96,000 sequences of 500 to 2,000 tokens",
    expected=(
        "accuracy (Shao et al., Table 4): Transformer 36.4 with LayerNorm and 37.0 with DTN, BigBird 36.7 and 37.5, "
        "Reformer 37.3 and 37.8"
    ),
    command=(
        'vitmods compare --task sequence_classification --data "listops:generated?min_length=500&max_length=2000'
        '&train=96000&val=2000&test=2000" --base LRA-512 --arms "dtn(norms=both)" --recipe listops'
    ),
    not_stated="how positions of DTN's kernels are made for sequences, and how many seeds there were",
    model="LRA-512",
    images=96_000,
)
def listops(steps: int = STEPS, *, batch_size: int = 32, lr: float | None = None) -> Recipe:
    """Long ListOps as in Long Range Arena's code: Adam, decay of all parameters, rate as 1 / sqrt(step).

    The rate is 0.05 min(1, t / w) / sqrt(max(t, w)) at step t, w = 1,000 being a fifth of the steps.

    Args:
        steps: of training; the warm-up is a fifth of them.
        batch_size: sequences per step; the learning rate stays.
        lr: highest learning rate; None: 0.05 / sqrt(1,000) = 1.58e-3.
    """
    warmup = max(1, steps // 5)
    return Recipe().with_(
        steps=steps,
        batch_size=batch_size,
        lr=0.05 / 1000**0.5 if lr is None else lr,
        schedule="rsqrt",
        warmup_steps=warmup,
        rsqrt_timescale=warmup,
        beta1=0.9,
        beta2=0.98,
        adam_eps=1e-9,
        weight_decay=0.1,
        decay_all=True,
        clip_norm=None,
        dropout=0.1,
        crop="none",
        flip=0.0,
        eval_crop=1.0,
    )
