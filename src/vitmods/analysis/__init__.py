"""What the papers plot of a model, as arrays and figures; each figure is a file of `vitmods.analysis.figures`."""

from vitmods.analysis.figure import FIGURES, Examined, FigureKind, NotHere
from vitmods.analysis.figures.norms import (
    first_norm_scales,
    principal_components,
    token_components,
    token_magnitudes,
    trade_offs,
    trade_offs_over_training,
    variation_coefficient,
)
from vitmods.analysis.figures.positions import (
    attention_distance,
    draw_distances,
    kernel_distance,
    kernel_images,
    mean_distance,
)
from vitmods.analysis.figures.training import gradients_by_depth, stem_gradient, throughput, training_costs

__all__ = [
    "FIGURES",
    "Examined",
    "FigureKind",
    "NotHere",
    "attention_distance",
    "draw_distances",
    "first_norm_scales",
    "gradients_by_depth",
    "kernel_distance",
    "kernel_images",
    "mean_distance",
    "principal_components",
    "stem_gradient",
    "throughput",
    "token_components",
    "token_magnitudes",
    "trade_offs",
    "trade_offs_over_training",
    "training_costs",
    "variation_coefficient",
]
