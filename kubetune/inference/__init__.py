"""The result of a run, opened and asked: `generate`, `chat`, classifying, and answers before and after.

Read `result` first.
"""
