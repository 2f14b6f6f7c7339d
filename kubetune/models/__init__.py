"""Hugging Face models made ready to train: loaded, adapted, quantised, sharded, run without padding, made fast.

Names, parameters and saving stay those of transformers and PEFT. Read `loading` first, then `padding_free`.
"""
