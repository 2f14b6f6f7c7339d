"""One rank of a run: the loop, its optimizer, its checkpoints, its evaluation, and what it tells.

Read `worker` first, then `loop`.
"""
