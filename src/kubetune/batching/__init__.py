"""Prepared rows to tensors: the packed batches of every step for one rank.

Not for which samples make up a step (data/order). Read `feed` first, then `batch`.
"""
