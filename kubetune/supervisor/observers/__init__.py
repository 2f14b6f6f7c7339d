"""News of a run for others, while it goes on: hooks, Prometheus, Kubeflow, OpenTelemetry.

A process beside the agent (`beside`) reads the run directory and tells; no rank waits for it, and the agent only a few
seconds at the end. Not for copies of a run's numbers in trackers (rundir/trackers) or of its files (mirror). Read
`beside` first.
"""
