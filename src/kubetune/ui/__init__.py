"""A page to work in: runs, live curves, data, new runs, results and chat, in a browser on this machine.

It needs Starlette and uvicorn (the extra `ui`). Templates are Jinja's; `reporting`'s are used too. Not for new
abilities: each page shows what a verb of the command line does, and says which. Read
`server` first, then `security`.
"""
