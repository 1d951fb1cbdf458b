"""Models for use instead of training: folded and packed, or written as a file for other programs."""

from .export import export
from .optimize import optimize_for_inference

__all__ = ["export", "optimize_for_inference"]
