"""Files of records in every format: a file here for each kind, whose `Reader` the table of endings names.

Nothing here knows what a record means. Read `reader` first.
"""
