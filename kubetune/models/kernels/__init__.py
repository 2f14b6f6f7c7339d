"""Operations written out with their backward, so that they fuse or save memory. Read `cross_entropy` first."""
