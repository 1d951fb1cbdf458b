"""A written answer to where a ViT's norms belong and which to take, as a comparison that can be run."""

from vitmods.papers.table import Claim, Paper, Tables, TableStudy

PAPER = Paper(
    "norm",
    "Where to place the normalization layer in a ViT-like model, and which type",
    "an answer without author, date or sources",
    "https://arxiv.org/abs/2002.04745",
    claims=(
        Claim(
            "part 1",
            "pre-norm is the stable choice; post-norm needs a careful, long warm-up, the more so the deeper",
            ("choice",),
        ),
        Claim("part 2", "RMSNorm often does as well as LayerNorm, or slightly better", ("choice",)),
        Claim(
            "part 2",
            "RMSNorm is 25 to 40 % faster on a GPU in some reports",
            ("choice",),
            slip="that is the norm alone, and no source is given",
        ),
        Claim("part 2", "BatchNorm is not for the blocks: it depends on the batch and mixes images", ("choice",)),
        Claim(
            "part 1",
            "in post-norm gradients flow past the norms along the residual path",
            ("choice",),
            slip="that is pre-norm; in post-norm the path goes through every norm (Xiong et al., 2020)",
        ),
    ),
)

Tables(PAPER).add(
    "choice",
    "Type and placement of the norms, with and without warm-up, at two depths",
    where="parts 1 and 2",
    data="none",
    scale="no experiment: statements alone",
    notes=("The link is to Xiong et al., On Layer Normalization in the Transformer Architecture, which examined it.",),
    study=TableStudy(
        arms={
            "RMSNorm": "rms=norm(kind=rms,exact=false)",
            "BatchNorm": "batch=batchnorm",
            "post-norm": "post=placement(attn=post,mlp=post)",
            "post-norm, RMSNorm": "post-rms=placement(attn=post,mlp=post)+norm(kind=rms,exact=false)",
        },
        base="pre-norm, LayerNorm",
        bases={"12 blocks": "Ti/16", "24 blocks": "Ti24/16"},
        sweep={"warmup_epochs": {"none": 0, "5 epochs": 5}},
        recipe="plain",
    ),
)
