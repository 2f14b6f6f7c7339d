"""Learning by reward (GRPO): the advantages of answers, the loss of their tokens, and the task made of both.

Not for how answers are drawn and rewarded: that is training/rollouts and scoring/rewards. Read `objective` first.
"""
