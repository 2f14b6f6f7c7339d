"""Attention over packed batches: in blocks, in joined parts, padded, or by torch on CUDA. Read `blockwise` first."""
