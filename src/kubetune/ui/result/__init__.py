"""The page of a run's result: evaluate, export and push it, by the verbs of these names, and check who serves it.

Not for what the verbs do (result). Read `pages` first, then `options`.
"""
