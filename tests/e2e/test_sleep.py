"""`paged sleep` and `paged wake` with a real server."""

from paged_client.cli import main
from tests.support.triton import metrics, post, raw_stream
from tests.support.waiting import until

MIB = 1 << 20
POOL = 1024 * MIB
REQUEST = {"text_input": "once upon", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = {"text_input": "x", "stream": True, "sampling_parameters": {"ignore_eos": True, "max_tokens": 200}}


def test_a_server_sleeps_and_wakes(named_server, capsys):
    server, name = named_server, named_server.model_name
    with raw_stream(server, model=name) as stream:
        at = ["--url", server.grpc_url]

        def resident_bytes():
            return metrics(server)["paged_memory_bytes{cpu}"]

        def ask():
            return post(server, REQUEST, model=name)

        status, expected = ask()
        assert status == 200
        until(lambda: ask() and resident_bytes() > 1.25 * POOL)
        stream.send(**LONG)
        assert not stream.next().error
        capsys.readouterr()

        assert main(["sleep", "--model", name, *at]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is asleep: freed 1.00 GiB in ")
        assert not stream.all()[-1].error, "the open request was not finished"
        until(lambda: metrics(server)["paged_sleeping"] == 1)
        assert resident_bytes() < 0.9 * POOL, "the pool was not given back"
        assert metrics(server)["paged_kv_blocks{free}"] == metrics(server)["paged_kv_blocks{total}"]
        assert "UNAVAILABLE: the model is asleep; wake it with `paged wake`" in ask()[1]
        assert main(["probe", *at]) == 0, "it would be restarted"
        assert main(["map", "--once", *at]) == 0
        assert "asleep" in capsys.readouterr().out
        assert main(["sleep", "--model", name, *at]) == 0
        assert capsys.readouterr().out == f"{name} is asleep already\n"

        assert main(["wake", "--model", name, *at]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is awake: restored 1.00 GiB in ")
        until(lambda: metrics(server)["paged_sleeping"] == 0)
        assert ask() == (200, expected)
