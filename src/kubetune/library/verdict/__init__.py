"""The verdict on a run before it starts: every problem that would keep it from training, as a sentence.

`init`, `data check`, `plan`, the page's form and `train` ask here, so that they say the same of the same run, and none
of them names the next command beside a problem. All is judged that the run file, the files at hand and the installed
extras decide. Nothing of the user's is run, no weights are read and no torch is imported. Not for the rows: `data/inspect`
judges them, and its findings of severity `error` are problems too, which follow these. Read `run_problems` first.
"""
