"""Mistakes in a run for a cluster, its config and its manifests, that schema validation cannot see.

Not for what makes manifests, which need no check to be made (manifests), and nothing here asks a cluster. Read `config`
first, then `objects`.
"""
