"""What is worth knowing about the data of a run before it is spent on: one list, shown alike wherever data are shown.

Read `finding` first: what a finding is. `row_watch` counts while rows go by, `sentences` makes the list.
"""
