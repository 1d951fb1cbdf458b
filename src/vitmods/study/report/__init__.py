"""One self-contained HTML page that tells what a study found."""

from vitmods.study.report.load import read_results, write_samples
from vitmods.study.report.page import write_report

__all__ = ["read_results", "write_report", "write_samples"]
