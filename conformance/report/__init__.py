"""The report: pages and files for other programs, all made from `report.json`."""

from conformance.report.page import write_page
from conformance.report.verdict_files import conclude

__all__ = ["conclude", "write_page"]
