"""Storms against a real server, and what is checked after them, in the manner of Jepsen.

Clients append what they ask and what they get to a history; some of them leave, are killed, stop reading or send
nonsense, by a seed. A checker reads the history afterwards and holds every token against what the same request got
alone.

    asks.py        requests, and the oracle: what each gets alone
    plans.py       the nemesis: by a seed, who asks what, and who leaves when and how
    clients.py     play a plan over gRPC or a raw HTTP socket, and write the history
    crowd.py       thousands of requests on a few streams
    murder.py      kills a process full of clients, victim.py
    history.py     events, as lines of JSON
    checker.py     reads them, and finds what must not be
    footprint.py   what the server's processes hold
    server.py      a server to storm, and its metrics
    models.py      what it is told to load
    storm.py       all of it together
    table.py       the figures

`python -m tests.support.stress --help` runs storms by hand, or checks a history again.
"""
