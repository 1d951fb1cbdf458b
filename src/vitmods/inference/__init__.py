"""Models for use instead of training: folded and packed, or written as a file for other programs."""

from .export import ENDINGS, export
from .optimize import optimize_for_inference

__all__ = ["ENDINGS", "export", "optimize_for_inference"]
