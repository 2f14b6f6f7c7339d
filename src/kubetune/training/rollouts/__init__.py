"""Answers of `task: grpo` to the prompts of a step: drawn by the model, rewarded, kept in files, made into batches.

Not for what rewards an answer (scoring/rewards) or for the loss (tasks/grpo). Read `rollout_feed` first, then `drawer`.
"""
