from .table import PAPERS as PAPERS
from .table import TABLES as TABLES
from .table import Claim as Claim
from .table import Number as Number
from .table import Paper as Paper
from .table import Table as Table
from .table import TableStudy as TableStudy
from .table import line_up as line_up
