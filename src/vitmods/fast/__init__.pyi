from .export import ENDINGS as ENDINGS
from .export import export as export
from .optimize import optimize_for_inference as optimize_for_inference
