"""Pages made from run directories: one HTML file that needs no network, for one run or for several side by side.

    from kubetune.reporting import write_report
    write_report([Path("outputs/demo/run")], Path("report.html"))

Charts are drawn by uPlot (vendor/, MIT), which is inlined whole.
"""

from kubetune.reporting.page import write_report

__all__ = ["write_report"]
