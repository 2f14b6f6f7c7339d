"""Answers of a model, generated in batches and judged: measures, the user's own, and how sure they are.

Not for what is asked or shown (result/inference, reporting), and not for losses (tasks). Read `judge` first: what a model is
asked at each evaluation of a run.
"""
