"""Attention over packed batches: in blocks, in parts that are joined, and padded. Read `blockwise` first."""
