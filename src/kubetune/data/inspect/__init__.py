"""Looking at data before anything is spent on them: what is bad, left out, trained on, and how much it is.

Read `check` first.
"""
