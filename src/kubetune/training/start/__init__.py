"""A run before its first step: data prepared, dtype chosen, memory tried, kernels compiled, facts logged.

Not for the loop, nor for anything it calls at every step. Read `data_preparation` first, then `parts`.
"""
