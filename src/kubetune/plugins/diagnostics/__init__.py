"""Runs that test machines (smoke), their speed (bench), and that a resumed run ends bit by bit the same.

Not for what is wrong with an installation (cli/installation/doctor). Read `resume_proof` first, then `smoke/checks`.
"""
