"""Pages: one HTML file that needs no network, of one run, of several side by side, or of the data of a run to be.

    from kubetune.reporting import write_report
    write_report([Path("outputs/demo/run")], Path("report.html"))

Charts are drawn by uPlot (vendor/, MIT), which is inlined whole. Not for collecting numbers (rundir/metrics). Read
`reading` first, then `page`.
"""

from kubetune.reporting.page import write_report

__all__ = ["write_report"]
