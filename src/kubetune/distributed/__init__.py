"""Several processes that train one model: who is who, how they find each other, who is missing, torchrun.

The room where torch begins. Not for splitting models (models/fsdp) or batches (data/prepared/micro_batches). Read
`process_group` first, then `rendezvous`.
"""
