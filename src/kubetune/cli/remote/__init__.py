"""The verbs under "On a cluster": one file a verb."""
