from .base import PROTOCOLS as PROTOCOLS
from .base import Protocol as Protocol
from .base import ProtocolResult as ProtocolResult
from .options import Options as Options
from .protocols import metrics as metrics
from .protocols import run_protocols as run_protocols
