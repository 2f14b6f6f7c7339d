"""The page of a sweep: its state, its trials over parallel axes, what mattered, and a table of all trials.

The values come from library/sweep/live_page, which reads a sweep's folder. Not for choosing trials. Read `facts`
first, then `parallel`.
"""
