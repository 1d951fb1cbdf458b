"""One self-contained HTML page that tells what a study found."""

from vitmods.report.load import read_results, write_samples
from vitmods.report.page import write_report

__all__ = ["read_results", "write_report", "write_samples"]
