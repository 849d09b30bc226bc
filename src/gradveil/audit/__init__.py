"""Audits: a plan becomes cells, cells become numbers that can be trusted or say why not."""

from gradveil.audit.cells import Cell

__all__ = ["Cell"]
