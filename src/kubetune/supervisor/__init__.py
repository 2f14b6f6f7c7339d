"""The first process of a run, on a laptop and in a pod alike: it starts the ranks and says how the run ended.

The command line by which runs are described lies here too (`command_line`): launchers and ranks by hand read it.
Imports no torch, so that it is there at once and stays small. Not for what a rank does (training). Read `agent` first,
then `supervise`.
"""
