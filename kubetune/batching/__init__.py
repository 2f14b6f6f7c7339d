"""Prepared rows to tensors: the packed batches of every step for one rank. Read `feed` first, then `batch`."""
