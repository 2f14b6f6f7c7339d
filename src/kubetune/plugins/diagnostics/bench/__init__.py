"""`kubetune bench`: how fast this machine trains models of random weights, and with which settings.

Every case is a real run in a process of its own. Read `cases` first: what is measured.
"""
