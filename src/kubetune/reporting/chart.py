"""One chart as data: its lines, what charts.js draws of it, and what it says in a table and in words.

Drawing is charts.js's; colours are the style sheet's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kubetune.reporting.series import Column, Series, merge, spread

_TABLE_ROWS = 10


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    series: Series
    colour: int = 0  # number of a colour of the style sheet
    kind: str = "line"  # line, smooth (charts.js smooths it) or points
    band: bool = True  # draw the lowest and highest behind a mean
    dash: int = 0  # number of a dash pattern
    run: int = 0  # index of the run on the page
    mark: str = ""  # the letter of the run, drawn on the line if there are several runs


@dataclass(frozen=True)
class Chart:
    """Lines over steps, with a title."""

    name: str
    title: str
    unit: str  # how values are written: fixed, short, exponent, bytes or percent
    lines: Sequence[Line]
    about: str = ""  # a sentence below the title
    axis: str = ""  # what the values are; the title if it is empty
    markers: Sequence[dict[str, Any]] = field(default_factory=tuple)  # vertical lines, with text

    def to_json(self) -> dict[str, Any]:
        """Return the chart as charts.js draws it.

        A line with a band takes three columns: the mean, the highest and the lowest. `bands` holds the
        column numbers of the two edges, with the steps in column 0:

            lines   loss   loss, highest   loss, lowest   evaluation loss
            column  1      2               3              4
            bands   [[2, 3]]
        """
        columns: list[Column] = []
        drawn: list[dict[str, Any]] = []  # how each column looks
        bands: list[list[int]] = []
        for line in self.lines:
            series = line.series
            of_run = {"colour": line.colour, "run": line.run}
            columns.append((series.steps, series.values))
            drawn.append(
                {
                    "label": line.label,
                    "kind": line.kind,
                    "dash": line.dash,
                    "mark": line.mark,
                    **of_run,
                }
            )
            if not line.band or series.low is None or series.high is None:
                continue
            # The columns of the band's edges. charts.js shades what lies between.
            bands.append([len(drawn) + 1, len(drawn) + 2])
            for name, edge in (("highest", series.high), ("lowest", series.low)):
                columns.append((series.steps, edge))
                drawn.append({"label": f"{line.label}, {name}", "kind": "edge", **of_run})

        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "axis": self.axis or self.title,
            "lines": drawn,
            "bands": bands,
            "data": merge(columns),
            "markers": list(self.markers),
        }

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return heading and a few rows of the lines' values. The first column is the step."""
        heading = ["step", *(line.label for line in self.lines)]
        columns = merge([(line.series.steps, line.series.values) for line in self.lines])
        rows = [list(row) for row in zip(*columns, strict=True)]
        return heading, spread(rows, _TABLE_ROWS)
