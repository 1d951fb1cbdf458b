"""Evaluation protocols for a trained model: accuracy, calibration, few-shot transfer, robustness.

Names are imported when first used: the shell reads the options of the protocols without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
