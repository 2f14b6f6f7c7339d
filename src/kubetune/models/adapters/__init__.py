"""Adapters of LoRA, in PEFT's own format: put into a model, and computed with its layers in few products, which may be
of 8-bit floats (`fp8`). What a saved one says is checked before PEFT does it (`saved`).

Not for the products themselves (kernels/lora), nor for adapters of experts (mixtures). Read `lora` first.
"""
