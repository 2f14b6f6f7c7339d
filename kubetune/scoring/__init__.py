"""Answers of a model, generated in batches and judged: measures, the user's own, and how sure they are.

Not for what is asked or shown (inference, reporting). Read `questions.py` first, then `metrics.py`.
"""
