"""Answers that stock vLLM servers draw: asked for by HTTP, with an adapter file for each version of the weights.

Not for what is done with the answers, which is as with answers that the model draws itself. Read `served_drawer` first.
"""
