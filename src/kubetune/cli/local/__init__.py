"""The verbs under "Run", on this machine: one file a verb."""
