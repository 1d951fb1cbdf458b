"""Faster and smaller forms of a model with the same outputs, and export to other programs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
