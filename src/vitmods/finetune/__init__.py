"""Fine-tuning: which parts are trained, task deltas, and several tasks on one backbone. Imports when used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
