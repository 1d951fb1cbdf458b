"""What the papers plot of a model, as arrays and figures; each figure is a file of `vitmods.analysis.figures`."""

from vitmods.analysis.figure import FIGURES, Examined, FigureKind, NotHere
from vitmods.analysis.figures.attention_distance import (
    attention_distance,
    draw_distances,
    kernel_distance,
    mean_distance,
)
from vitmods.analysis.figures.first_norm import first_norm_scales
from vitmods.analysis.figures.gradients import gradients_by_depth, stem_gradient
from vitmods.analysis.figures.kernels import kernel_images
from vitmods.analysis.figures.lambdas import trade_offs, trade_offs_over_training
from vitmods.analysis.figures.partial_training import training_costs
from vitmods.analysis.figures.throughput import throughput
from vitmods.analysis.figures.token_magnitude import token_magnitudes
from vitmods.analysis.figures.token_pca import principal_components, token_components
from vitmods.analysis.figures.variation import variation_coefficient

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
