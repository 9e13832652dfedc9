"""The report: pages, a badge and lists for other programs, all of them functions of `report.json`."""

from conformance.report.files import conclude
from conformance.report.page import write_page

__all__ = ["conclude", "write_page"]
