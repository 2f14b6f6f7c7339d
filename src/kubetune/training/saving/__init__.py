"""Checkpoints of a run: what is copied between two steps, how its files are written, and how a run is resumed from them.

Not for folders, links and checksums (rundir), nor for the optimizer's files (training/optimizer). Read `checkpointer` first.
"""
