"""Python's way to all that the command line does with runs: what `import kubetune` gives, each name a file or two away.

Not for new abilities: a function here reads its arguments, calls the rooms above, and raises what they raise. What is
the same for a verb and a function stands here, and cli takes it from here. Read `runs` first, then `training`.

A run trains in a process of its own (`child`), to which only data go: functions of a user's own reach it by their file
and name (`functions`).
"""
