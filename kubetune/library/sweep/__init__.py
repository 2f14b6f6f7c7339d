"""Search for the best settings: many runs of one run file, whose values Optuna chooses.

Each trial is a run, here or on a cluster. It pauses with a checkpoint at its rungs, and continues if
it is good enough. Read `driver` first. Training and pods are the work of supervisor and k8s/cluster,
and how a page looks is reporting's.
"""
