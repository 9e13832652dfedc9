"""The report: one self-contained HTML page, a pure function of `report.json`."""

from conformance.report.page import write_page

__all__ = ["write_page"]
