"""Report a run to others while it goes on: hooks, Prometheus, Kubeflow, OpenTelemetry.

A process beside the agent (`observer_process`) reads the run directory and reports. No rank waits for it, and the agent
only for a few seconds at the end. Not for copies of a run's numbers in trackers (rundir/tracking) or of its files
(mirror). Read `observer_process` first.
"""
