"""Search for the best settings: many runs of one run file, whose values Optuna chooses.

Each trial is a run, here or on a cluster. It pauses with a checkpoint at its rungs, and continues if
it is good enough. Not for training or for starting pods (supervisor and k8s/cluster), and not for how
a page looks (reporting). Read `driver` first.
"""
