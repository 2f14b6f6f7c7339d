"""Several processes that train one model: who is who, how they find each other, torchrun, and who hangs.

The room where torch begins. Read `process_group` first.
"""
