"""A step as one HTML page that can be mailed: what it holds, sends and wastes, and what its compiler made of it.

Start with `page.py`. Imports analysis, bench and viz; the command imports it.
"""

from shardkit.reporting.page import StepReport, report

__all__ = ["StepReport", "report"]
