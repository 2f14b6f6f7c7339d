"""All that kubetune can do without: clusters on Nebius, other tools' configs, data sets' recipes, serving, dev pods.

Only cli imports a plugin; a plugin imports any room above it. Not for what a run needs. Read `importers` first: one
engine, and a table for each tool.
"""
