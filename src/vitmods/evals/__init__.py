"""What is measured of a trained model: accuracy, calibration, few-shot transfer, robustness.

Names are imported when first used: the shell reads the options of the protocols without torch.
"""

from typing import TYPE_CHECKING

from vitmods.lazy import lazy_names

_HOME = {
    "Findings": "findings",
    "METRICS": "protocols",
    "Metric": "metrics",
    "Options": "options",
    "PROTOCOLS": "protocols",
    "Protocol": "protocols",
    "run_protocols": "protocols",
    "top1": "accuracy",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from .accuracy import top1 as top1
    from .findings import Findings as Findings
    from .metrics import Metric as Metric
    from .options import Options as Options
    from .protocols import METRICS as METRICS
    from .protocols import PROTOCOLS as PROTOCOLS
    from .protocols import Protocol as Protocol
    from .protocols import run_protocols as run_protocols

__getattr__, __dir__ = lazy_names(__name__, _HOME)
