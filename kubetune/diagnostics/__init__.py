"""Runs that test: whether machines are fit for a run (smoke), and whether a resumed run ends bit by bit the same."""
