"""Metrics over a whole split, exact for every picture."""

from vitmods.evals.top1 import top1

__all__ = ["top1"]
