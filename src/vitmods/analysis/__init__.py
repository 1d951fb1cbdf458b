"""What the papers plot of a model, as arrays and figures; each figure is a file of `vitmods.analysis.figures`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
