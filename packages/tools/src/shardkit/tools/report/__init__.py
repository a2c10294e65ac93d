"""Reports: their schema, and everything made from them."""

from shardkit.tools.report.files import ReportError, read_report, write_report
from shardkit.tools.report.schema import Report

__all__ = ["Report", "ReportError", "read_report", "write_report"]
