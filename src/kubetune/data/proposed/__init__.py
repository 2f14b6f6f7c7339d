"""The run that data are for of which nothing is known: task, shape, columns, settings. `kubetune init` writes it down.

Read `proposing` first.
"""
