"""From a checkpoint to a model that others can load: exported, described, uploaded.

Not for the weights and their proof (forms), nor for running it (inference, plugins/serving). Read `exporting` first.
"""
