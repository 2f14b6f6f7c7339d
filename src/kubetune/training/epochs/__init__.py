"""What a run tells of its epochs while it trains: lines of the log, and a table on a terminal. Read `run_table` first.

Not for single steps (run_log).
"""
