"""The run file: its schema, how it is read, where each value came from, and everything that can be wrong with one.

Not for arithmetic on settings (plan) nor for other tools' configs (plugins/importers). Read `schema` first.
"""
