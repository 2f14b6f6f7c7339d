"""Text to ids and labels: tokenizers, chat templates, and which tokens are trained.

Read `encode` first, then `turns`.
"""
