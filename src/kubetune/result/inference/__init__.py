"""The result of a run, opened and asked: evaluated, made to answer or to classify, before and after training.

Not for serving many users (plugins/serving). Read `result` first, then `answering`.
"""
