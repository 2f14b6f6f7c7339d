"""All that kubetune can do without: clusters on Nebius, other tools' configs, data sets' recipes, serving, dev pods.

Only cli imports a plugin; a plugin imports any room but cli.
"""
