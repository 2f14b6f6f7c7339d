"""Text to ids and labels: tokenizers, chat templates, and which tokens are learnt.

Read `templates` first, then `turns`.
"""
