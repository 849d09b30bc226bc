"""Audits: a plan becomes cells, cells become numbers that can be trusted or say why not."""

from gradveil.study.cell import Cell

__all__ = ["Cell"]
