"""The chat of the page: its pages, the models that are held, and the process of each model.

Not for what a terminal's chat does (cli). Read `chat_page` first, then `talkers`.
"""
