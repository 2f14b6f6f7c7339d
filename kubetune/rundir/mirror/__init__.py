"""A copy of a run directory in an object store, kept up while the run goes on.

`copier` is the process beside a run, `sync` copies, `lease` says whose copy it is. Read `sync` first.
"""
