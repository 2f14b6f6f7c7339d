"""Hugging Face models made ready to train: loaded, adapted, quantised, sharded, run without padding, made fast.

Names, parameters and saving stay as in transformers and PEFT. Not for losses and metrics (tasks), nor for reading
models' shapes without torch (plan/model_shapes). Read `loading` first, then `padding_free`.
"""
