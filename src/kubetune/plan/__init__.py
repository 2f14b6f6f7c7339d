"""The arithmetic of a run before anything is held: batches and steps, peak memory, hours and price.

Not for measuring (training/start/preflight) nor for printing (cli/prepare/plan). Read `plan` first, then `forecast`.
"""
