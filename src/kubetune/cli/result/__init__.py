"""The verbs under "Use the result": one file a verb."""
