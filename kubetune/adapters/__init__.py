"""Adapters of LoRA, in PEFT's own format: put into a model, and computed with its layers in few products.

Not for the products themselves (kernels/lora), nor for adapters of experts (mixtures). Read `lora` first.
"""
