"""Results folder in, one self-contained HTML page out. Needs no torch."""

from gradveil.report.render import write_report

__all__ = ["write_report"]
