"""Models of other libraries to and from (config, weights), one library a file, each imported only when needed.

``load`` and ``save`` are for files, ``from_...`` and ``to_...`` for model objects; ``coverage`` says what became of
every tensor. ``vitmods.apply`` and ``vitmods.diff`` take all these model objects as they are. ``replace_norms`` gives
any other transformer new norms, and ``norm_sites`` lists those that it has.
"""

from typing import TYPE_CHECKING

from vitmods.lazy import lazy_names

_HOME = {
    "open_checkpoint": "named",
    "open_model": "named",
    "load": "files",
    "save": "files",
    "coverage": "files",
    "Coverage": "tensors",
    "from_timm": "timm",
    "to_timm": "timm",
    "from_huggingface": "huggingface",
    "to_huggingface": "huggingface",
    "from_torchvision": "torchvision",
    "to_torchvision": "torchvision",
    "replace_norms": "replace",
    "norm_sites": "anatomy",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from .anatomy import norm_sites as norm_sites
    from .files import coverage as coverage
    from .files import load as load
    from .files import save as save
    from .huggingface import from_huggingface as from_huggingface
    from .huggingface import to_huggingface as to_huggingface
    from .named import open_checkpoint as open_checkpoint
    from .named import open_model as open_model
    from .replace import replace_norms as replace_norms
    from .tensors import Coverage as Coverage
    from .timm import from_timm as from_timm
    from .timm import to_timm as to_timm
    from .torchvision import from_torchvision as from_torchvision
    from .torchvision import to_torchvision as to_torchvision

__getattr__, __dir__ = lazy_names(__name__, _HOME)
