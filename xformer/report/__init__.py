"""Reads result files; writes tables, pictures and a page. Knows no model and no attention."""

from xformer.report.costs import CostRow
from xformer.report.page import Measured, Report, write, write_tasks
from xformer.report.patterns import Pattern

__all__ = ["CostRow", "Measured", "Pattern", "Report", "write", "write_tasks"]
