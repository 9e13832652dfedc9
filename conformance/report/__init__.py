"""The report: pages, a badge and lists for other programs, all of them functions of `report.json`."""

from conformance.report.page import write_page
from conformance.report.verdict_files import conclude

__all__ = ["conclude", "write_page"]
