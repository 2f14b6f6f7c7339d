"""The run directory, which training, the cluster verbs and reports share: checkpoints, metrics, exit status, trackers.

Not for what a checkpoint holds of a model (training/saving). Read `checkpoints` first, then `metrics`.
"""
