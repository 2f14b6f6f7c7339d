"""Log-probabilities of all answers under the model before training, which losses on pairs compare with.

Not for the loss (tasks/preference), nor for the reference of `task: grpo` (training/rollouts). Read `attached` first.
"""
