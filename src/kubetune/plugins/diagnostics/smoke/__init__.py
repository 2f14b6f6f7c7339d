"""`kubetune smoke`: a tiny run that tests ranks, links, devices and volumes.

Read `checks` first: what all ranks check together.
"""
