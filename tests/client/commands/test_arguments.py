"""Arguments that several commands share."""

from paged_client.commands.arguments import parse_pairs


def test_pairs_are_parsed_as_json_or_text():
    pairs = parse_pairs("-p", ["a=1", "b=1.5", "c=true", "d=null", 'e=["x"]', 'f="1"', "g=x y", "h=", "i=[1"])
    assert pairs == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": None,
        "e": ["x"],
        "f": "1",
        "g": "x y",
        "h": "",
        "i": "[1",
    }
