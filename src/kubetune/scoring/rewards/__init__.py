"""Rewards of answers: built in, or functions of the user's, computed in a process of their own with a deadline.

Not for advantages (tasks/grpo) or for metrics of an evaluation (scoring/metrics). Read `pool` first.
"""
