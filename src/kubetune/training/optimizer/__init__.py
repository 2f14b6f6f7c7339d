"""AdamW on flat buffers: for one rank, in 8 bits, over sharded weights; and its state in files.

Not for when weights move, nor for what else a checkpoint holds (training). Read `adamw` first, then `shards`.
"""
