"""Answers that stock vLLM servers draw: asked for by HTTP, with an adapter file for each version of the weights.

`calls` and `vllm_client` know nothing of drawing: a teacher on servers is asked by them too (reference/served_teacher).
Not for what is done with the answers, which is as with answers that the model draws itself. Read `served_drawer` first.
"""
