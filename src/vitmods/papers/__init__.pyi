from .line_up import TableStudy as TableStudy
from .line_up import line_up as line_up
from .table import PAPERS as PAPERS
from .table import TABLES as TABLES
from .table import Claim as Claim
from .table import Number as Number
from .table import Paper as Paper
from .table import Table as Table
