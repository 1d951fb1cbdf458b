from .export import ENDINGS as ENDINGS
from .export import export as export
from .forms import Forms as Forms
from .memory import checkpoint as checkpoint
from .memory import recompute as recompute
from .memory import recompute_frozen_mlps as recompute_frozen_mlps
from .optimize import optimize_for_inference as optimize_for_inference
