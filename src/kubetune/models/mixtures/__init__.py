"""Mixtures of experts: the tensors that LoRA adapts, how adapted experts run, how routers load and balance them.

Not for products of rows sorted by expert (kernels/experts). Read `stacked_experts` first, then `routing`.
"""
