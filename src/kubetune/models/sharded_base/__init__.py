"""A frozen base over all ranks (`training.parallelism: shard_base`): each holds a part of every layer's bytes.

Not for weights that learn, which fsdp slices. Read `base_shards` first: `units` are the bytes, `cutting` says what is
cut, and `reading` cuts it while it is read.
"""
