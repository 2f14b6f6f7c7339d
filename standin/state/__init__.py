"""Objects, their kinds, and the one place where they are kept."""
