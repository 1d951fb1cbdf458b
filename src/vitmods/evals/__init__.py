"""What is measured of a trained model: accuracy, calibration, few-shot transfer, robustness."""

from vitmods.evals.top1 import top1

__all__ = ["top1"]
