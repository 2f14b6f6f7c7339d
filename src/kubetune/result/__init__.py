"""The result of a run: opened and asked (`inference`), exported, proved the same and uploaded (`publishing`).

Not for judging answers while a run trains (scoring). Read `inference/result` first.
"""
