"""Attention over packed batches, hooked into transformers: for flash kernels, in blocks, and padded.

Read `hooks` first.
"""
