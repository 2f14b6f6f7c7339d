"""Facts about the data of a run that a person should know first: one list, shown alike wherever data are shown.

Read `finding` first: what a finding is. `sentences` makes the list.
"""
