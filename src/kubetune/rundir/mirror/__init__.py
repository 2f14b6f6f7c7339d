"""A copy of a run directory in an object store, kept up while the run goes on.

`copier` is the process beside a run, `sync` sends and fetches, `lease` says whose copy it is. Not for the run directory's
own files (rundir). Read `sync` first.
"""
