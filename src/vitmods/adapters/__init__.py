"""Models of other libraries to and from (config, weights), one library a file, each imported only when needed.

``load`` and ``save`` are for files, ``from_...`` and ``to_...`` for model objects; ``coverage`` says what became of
every tensor. ``vitmods.apply`` and ``vitmods.diff`` take all these model objects as they are. ``replace_norms`` gives
any other transformer new norms, and ``norm_sites`` lists those that it has. Importing ``timm_models`` registers our
models with timm.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
