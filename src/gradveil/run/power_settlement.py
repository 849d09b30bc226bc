"""Gives cells their power curves when all points are measured, as `gradveil.run.power` says which those are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from gradveil.audit.materials import Materials
from gradveil.run.jobs import Job, cell_key, read_point
from gradveil.run.power import Measured, Point, always_measured, curve_of
from gradveil.storage.run_folder import Store
from gradveil.study.cell import Cell

__all__ = ["PowerSettlement"]


class PowerSettlement:
    """Knows which points a cell's power curve is made of, and writes it down when they are there."""

    def __init__(self, store: Store, cells: Mapping[str, Cell], asked: bool, materials: Materials) -> None:
        """Make the curves of all cells where power is asked for, else of those whose ensemble always has one."""
        self._store = store
        self._read_so_far: dict[str, Measured] = {}
        everything, keys = dict(cells), {cell: key for key, cell in cells.items()}

        def key_of(cell: Cell) -> str:
            if cell not in keys:
                keys[cell] = cell_key(cell, materials)
            return keys[cell]

        wanted = [cell for cell in cells.values() if asked or always_measured(cell)]
        self.curves = [curve_of(cell, key_of, everything, materials) for cell in wanted]

    @property
    def jobs(self) -> list[Job]:
        """The points that are no cell of the run, breadth first: what is found at one decides about the next of its curve."""
        rows = itertools.zip_longest(*(curve.points for curve in self.curves))
        points = {point.key: point for row in rows for point in row if point is not None and not point.is_cell}
        return [
            Job(point.task, key, tuple(curve for curve in self.curves if point in curve.points)) for key, point in points.items()
        ]

    def done(self) -> set[str]:
        """Return the keys of points that are measured or that no curve wants."""
        return {
            job.key
            for job in self.jobs
            if self._store.read_rung(job.key) is not None
            or not any(curve.wants(Point(job.work, job.key), self._read) for curve in job.curves)  # type: ignore[arg-type]
        }

    def settle(self, key: str = "") -> None:
        """Give cells their curves: all of them, or those that a finished piece of work concerns."""
        for curve in self.curves:
            if key and key not in {curve.cell.key, *(point.key for point in curve.points)}:
                continue
            found = curve.power(self._read)
            if found is not None:
                self._store.give_power(curve.cell.key, *found)

    def _read(self, point: Point) -> Measured | None:
        """Return what is known of a point; results do not change, so each file is read once."""
        if point.key not in self._read_so_far:
            found = read_point(self._store, point)
            if found is None:
                return None
            self._read_so_far[point.key] = found
        return self._read_so_far[point.key]
