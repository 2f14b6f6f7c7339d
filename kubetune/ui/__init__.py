"""A page to work in: the runs of a folder, live curves, data, new runs and chat, served to a browser on this machine.

Starlette and uvicorn (the extra `ui`); templates are Jinja's, those of `reporting` among them. Not for new abilities:
each page shows what a verb of the command line does, and says which. Read `server` first, then `security`.
"""
