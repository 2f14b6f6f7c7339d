"""The ground of everything else: files, locks, logs, processes, signals, and values as people read them.

Not for anything that knows what a run is. Read `files` first: how a file appears whole or not at all.
"""
