"""What is trained: a loss, and the metric that evaluates it."""

from vitmods.tasks.classification import Classification

__all__ = ["Classification"]
