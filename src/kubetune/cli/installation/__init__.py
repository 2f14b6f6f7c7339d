"""The verbs under "This installation": one file a verb."""
