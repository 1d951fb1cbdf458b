"""The same function in less time or memory, put on from outside, and files for other programs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
