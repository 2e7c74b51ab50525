"""Stress tests with fault injection against a real server, and a checker of their histories, in the manner of Jepsen.

Clients append their requests and the responses to a history. By a random seed, some of them disconnect, are killed,
stop reading or send invalid requests. A checker reads the history afterwards and compares every token with the output
of the same request without load.

    requests.py         requests, and their expected output without load
    plans.py            the fault injector: by a seed, which client sends what, and who disconnects when and how
    clients.py          clients that execute a plan over gRPC or a raw HTTP socket, and write the history
    multiplexed.py      thousands of requests on a few streams
    kill_client.py      kills a process with many clients, client_process.py
    history.py          events, as lines of JSON
    checker.py          reads them and finds violations
    footprint.py        threads, files, sockets and memory of the server's processes
    server.py           the server under test, and its metrics
    models.py           loads and unloads its model
    campaign.py         the stress tests
    table.py            the figures

`python -m tests.support.stress --help` runs stress tests by hand, or checks a history again.
"""
