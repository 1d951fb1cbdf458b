"""What is trained and how it is measured: one file per task. Names are imported when first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
