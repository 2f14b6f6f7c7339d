"""The functions of `import kubetune`: what the command line does with runs, from Python.

Not for new abilities: a function here reads its arguments, calls the rooms above, and raises what
they raise. What a verb and a function share is here, and cli takes it from here. Read `run_handle` first,
then `training`.

A run trains in a process of its own (`child`), to which only data are sent; a user's functions reach
it by their file and name (`users_functions`).
"""
