"""The five Kubernetes kinds that a run can be, one file each, and what they share: failure policies, gangs, Services.

Read `job` first: the others say what they do differently.
"""
