"""Images: from a folder or a named set to augmented batches that any run can repeat exactly."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
