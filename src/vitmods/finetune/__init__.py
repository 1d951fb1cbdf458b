"""Fine-tuning: which parts are trained, what is kept of a task, and many tasks on one backbone. Imports when used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
