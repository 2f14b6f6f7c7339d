"""Whether an address serves the model that was trained: its ids, its log-probabilities, its settings.

Nothing here loads a model: the run keeps what is compared. Not for starting or rendering servers (plugins/serving). Read
`server_check` first.
"""
