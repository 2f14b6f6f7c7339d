"""Operations on tensors, each with its backward written out, so that they fuse or save memory; and a device's speed.

Not for the places at which models use them, nor for any knowledge of models (models). Read `cross_entropy` first,
then `pointwise`.
"""
