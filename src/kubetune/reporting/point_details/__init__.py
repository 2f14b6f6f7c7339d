"""What is shown with the number that a run is about: its curve, classes, teacher, answers, and the progress of the run.

Begin with `underway`. Not for the number itself (reporting/point), nor for how all of it is put together (reporting/hero).
"""
