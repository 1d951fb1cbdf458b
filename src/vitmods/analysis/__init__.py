"""What the papers plot of a model: how far its attention looks."""

from vitmods.analysis.attention_distance import attention_distance, draw_distances, kernel_distance, mean_distance

__all__ = ["attention_distance", "draw_distances", "kernel_distance", "mean_distance"]
