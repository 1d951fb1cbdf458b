"""Studies: arms times seeds on one data set, their effects, and the page that reports them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
