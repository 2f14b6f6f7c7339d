"""What stands beside the number that a run is about: its classes, its teacher, its answers, and what is before it.

Begin with `underway`. Not for the number itself (reporting/point), nor for how all of it is put together (reporting/hero).
"""
