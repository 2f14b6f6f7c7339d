"""The shapes of a run directory's files: what a received run must hold before pages, lists and verbs rely on it.

Read `records`. Not for run files (config), nor for weights (models/weight_files).
"""

from kubetune.rundir.shapes.records import is_event, is_load, problem_of_header, read

__all__ = ["is_event", "is_load", "problem_of_header", "read"]
