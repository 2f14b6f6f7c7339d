"""The agents of a run's nodes: they meet before a start, stay connected while it goes on, and notice who is lost.

    node 0                      node 1
    listens    ←── hello ────   {"run": "fit", "id": "5e0a…", "node": 1, "nodes": 3, "host": "fit-1"}
               ─── waits ──→    {"waits": "node 2"}                      whenever that changes
               ─── go ─────→    {"start": "9f3c2a…", "port": 41234}      once all have come
               ←── end ────→    {"code": 145, "reason": "…"}             how the start ended on that node
               ─── lost ───→    {"lost": "node 2 on fit-2 …"}

Each message is one line of JSON. While the ranks train nothing is sent, and the kernel alone watches the connection: it
answers for a process that is slow, stopped or swapped out, and it no longer answers if the machine or its network is
gone. So a slow node is never taken for a lost one.

Until `go` nothing is lost with a connection: whoever waits connects again. After it a lost connection, or a node that
comes a second time, ends the start on all nodes. Not for ranks, which meet on a board (distributed/rendezvous).

Whatever else connects (a port scanner, a health check, a node of another run) is parted from and changes nothing: only
who has read the run's id in its directory belongs to it. The id tells runs apart. It is no password.

Read `link` first, then `centre`.
"""
