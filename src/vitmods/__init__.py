"""Published design changes for Vision Transformers, tried on your own model and images with paired seeds.

Names are imported when first used, so that ``import vitmods`` and the shell's help stay quick.
"""

from typing import Any

import lazy_loader

from vitmods.model.forms import set_default_forms

__version__ = "0.1.0"


def _fast_forms() -> Any:
    from vitmods.fast.forms import Forms

    return Forms()


set_default_forms(_fast_forms)  # models are plain and know nothing of what makes them fast

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
