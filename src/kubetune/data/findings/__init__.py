"""What is worth knowing about the data of a run before it is spent on: one list, shown alike wherever data are shown.

Read `finding` first: what a finding is. `sentences` makes the list.
"""
