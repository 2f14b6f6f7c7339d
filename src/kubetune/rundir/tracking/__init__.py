"""Trackers of a run: MLflow, TensorBoard, wandb, trackio. Each is sent to by a thread of its own.

Not for the run's own files of numbers (rundir/metrics). Read `trackers` first, then `tracker_queue`.
"""
