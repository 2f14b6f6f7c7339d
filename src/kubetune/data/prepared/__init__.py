"""Prepared data: written once under a fingerprint of what made them, then read by every rank in one order.

Read `prepare` first, then `row_maker`.
"""
