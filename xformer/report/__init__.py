"""Reads result files; writes tables, pictures and a page. Knows no model and no attention."""

from xformer.report.costs import CostRow
from xformer.report.own_sections import Section
from xformer.report.own_sections import find as find_sections
from xformer.report.page import Measured, Report, write, write_tasks
from xformer.report.patterns import Pattern
from xformer.report.results import Comparison
from xformer.report.tables import Table

__all__ = [
    "Comparison",
    "CostRow",
    "Measured",
    "Pattern",
    "Report",
    "Section",
    "Table",
    "find_sections",
    "write",
    "write_tasks",
]
