"""From a checkpoint to a model that others can load: exported, merged, proved the same, described, uploaded.

Not for running it (inference, plugins/serving). Read `export` first, then `equivalence`.
"""
