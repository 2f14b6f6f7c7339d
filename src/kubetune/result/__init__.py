"""The result of a run: opened and asked (`inference`), written and proved in a form (`forms`), uploaded (`publishing`).

Not for judging answers while a run trains (scoring). Read `inference/result` first.
"""
