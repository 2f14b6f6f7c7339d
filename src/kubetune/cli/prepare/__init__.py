"""The verbs under "Prepare a run": one file a verb."""
