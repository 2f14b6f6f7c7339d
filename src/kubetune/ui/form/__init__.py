"""The form of a new run: its fields, what may be filled in, and what to do about a mistake.

Read `new_run` first: it answers the page. `starts` starts what is typed; `fixes` makes the buttons of the box of problems.
"""
