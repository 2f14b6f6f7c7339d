"""Looking at data before anything is spent on them: what is bad, left out, learnt, and how much it is.

Read `check` first.
"""
