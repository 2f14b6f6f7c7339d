"""From a checkpoint to a model that others can load: exported, merged, proved the same, described, uploaded.

Read `export` first.
"""
