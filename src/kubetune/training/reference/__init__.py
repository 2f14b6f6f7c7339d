"""What another model says: the one before training, which losses on pairs compare with, or the teacher of a run.

Not for the loss (tasks/preference), nor for the reference of `task: grpo` (training/rollouts). Read `attached` first.
"""
