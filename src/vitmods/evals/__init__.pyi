from .metrics import Metric as Metric
from .options import Options as Options
from .protocols import METRICS as METRICS
from .protocols import PROTOCOLS as PROTOCOLS
from .protocols import Protocol as Protocol
from .protocols import run_protocols as run_protocols
from .result import ProtocolResult as ProtocolResult
