"""From files and hub data sets to prepared rows: read, made one shape, turned into ids and labels, ordered.

Not for tensors (batching). Read `order` first: which samples make up which step; then `reading/formats`.
"""
