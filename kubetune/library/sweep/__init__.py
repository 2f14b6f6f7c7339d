"""Search for the settings that serve best: many runs of one run file, of which Optuna chooses values and losers.

Each trial is a run of its own, here or on a cluster, paused at rungs with a checkpoint and gone on with bit by bit.
Not for training or for starting pods (supervisor and cluster do that), and not for how a page looks (reporting). Read
`driver` first.
"""
