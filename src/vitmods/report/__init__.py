"""What a study or an evaluation found, for people: one self-contained HTML page, tables and figures."""

from vitmods.report.page import write_report
from vitmods.report.tables import print_answer, render

__all__ = ["print_answer", "render", "write_report"]
