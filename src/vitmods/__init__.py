"""Published design changes for Vision Transformers, tried on your own model and images with paired seeds.

Names are imported when first used, so that ``import vitmods`` and the shell's help stay quick.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
