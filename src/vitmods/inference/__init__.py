"""Models for use instead of training: folded, packed, exported."""

from .optimize import optimize_for_inference

__all__ = ["optimize_for_inference"]
