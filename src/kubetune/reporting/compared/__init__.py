"""Several runs side by side: which is better, the curves that compare, and what differs in their settings.

Begin with `run_comparison`.
"""
