"""What the page does with the result of a run: evaluates, exports and pushes it, by the verbs of these names.

Not for what the verbs do (result). Read `pages` first, then `options`.
"""
