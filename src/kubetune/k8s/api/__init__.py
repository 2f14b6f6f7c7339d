"""The API server: who we are to it, plain objects in and out, watches, and each refusal as a sentence.

Not for what a run is (cluster). Read `client` first: the only file that talks to an API server.
"""
