"""Text to ids and labels: tokenizers, chat templates, and which tokens are trained.

Read `templates` first, then `turns`.
"""
