"""One rank of a run: the loop, its optimizer, its checkpoints, its evaluation, and what it tells.

Not for several ranks at once (supervisor starts them, distributed lets them talk). Read `worker` first, then `loop`.
"""
