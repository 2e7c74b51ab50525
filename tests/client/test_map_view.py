"""Tests of the pictures of a block pool, and of `paged map`."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from client import map_html, map_png, map_terminal
from client.cli import main
from client.map_terminal import Style, frame
from client.map_view import KINDS, SHARED_COLOURS, Recording, colour_of, columns_for, kind_of
from client.types import PoolMap
from tests.support.fake_servers import SERVERS, WAIT

ROOT = Path(__file__).parents[2]
EVERY = ".c123456789+p"
STYLES = [Style(), Style(unicode=False), Style(colour=True), Style(colour=True, unicode=False)]
SGR = re.compile(r"\x1b\[[\d;]*m")


def pool_of(states, **others):
    values = {"time": 12.5, "block_size": 16, "running": 1, "waiting": 2, "tokens": 20, "preemptions": 4}
    return PoolMap(**(values | {"num_blocks": len(states), "states": states, "cached_tokens_hit": 3} | others))


def over_time(*states):
    """A recording with a map a second."""
    return Recording(*(pool_of(one, time=100.0 + second) for second, one in enumerate(states)))


def counts_in(text):
    """Return the count of each kind in a header or a legend."""
    return {kind.name: int(re.search(rf"([\d,]+) {kind.name} \(", text).group(1).replace(",", "")) for kind in KINDS}


def test_every_state_has_one_kind_and_its_own_colour():
    assert "".join(kind.states for kind in KINDS) == EVERY
    assert all(kind_of(state).states.count(state) == 1 for state in EVERY)
    assert len({colour_of(state) for state in EVERY}) == len(EVERY)


@pytest.mark.parametrize("blocks", [1, 7, 33, 256, 100_000])
def test_a_grid_is_wider_than_high_and_holds_every_block(blocks):
    columns = columns_for(blocks)
    rows = -(-blocks // columns)
    assert rows <= columns <= blocks


def test_a_clock_set_back_does_not_move_time_backwards():
    recording = Recording(*(pool_of(".", time=when) for when in (10.0, 12.0, 7.0, 13.0)))
    assert recording.seconds == [0, 2, 2, 3]


def cells_of(line):
    """Return (SGR parameters, character) of each cell."""
    cells, sgr = [], ""
    for code, char in re.findall(r"\x1b\[([\d;]*)m|(.)", line):
        if char:
            cells.append((sgr, char))
        else:
            sgr = code
    return cells


def grid_of(lines):
    """Return {number of a row's first block: its cells} of a frame without colour."""
    found = (re.fullmatch(r" *(\d+) ([.·a-zA-Z░█\d+]+)", line) for line in lines)
    return {int(row.group(1)): row.group(2) for row in found if row}


class TestTerminal:
    def test_one_frame(self):
        lines = frame(over_time("." * 15, "11." + "." * 12, EVERY + "1c"), 72, 40, Style())
        assert lines[:7] == [
            "15 blocks of 16 tokens  1 free (6.7%)  2 cached (13.3%)  2 owned (13.3%)",
            "9 shared (60.0%)  1 pinned (6.7%)  1 running, 2 waiting",
            "11.4% of the used slots are filled",
            " 0 ·░█23456789+p█░",
            "· free: empty  ░ cached: unreferenced, in the prefix cache",
            "█ owned: used by 1 sequence  23456789+ shared: used by 2-9, + for more",
            "p pinned: kept by a session",
        ]
        assert lines[-1] == "        the last 2.0 s"

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("states", ["1", "12c.p+1", EVERY * 20, EVERY * 7693])
    @pytest.mark.parametrize(("width", "height"), [(1, 1), (5, 3), (16, 6), (20, 10), (40, 24), (80, 24), (200, 60)])
    def test_it_fits_any_terminal(self, style, states, width, height):
        lines = frame(over_time(states[::-1], states, states), width, height, style)
        assert 1 <= len(lines) <= height
        assert max(len(SGR.sub("", line)) for line in lines) <= width
        assert style.unicode or "".join(lines).isascii()
        assert style.colour or "\x1b" not in "".join(lines)
        if width >= 16:
            assert any(re.match(r" *0 .", SGR.sub("", line)) for line in lines)  # the grid is there

    @pytest.mark.parametrize("states", ["1", "12c.p+1", EVERY * 20, EVERY * 7693])
    def test_the_counts_add_up(self, states):
        found = counts_in("\n".join(frame(over_time(states), 120, 40, Style())))
        assert sum(found.values()) == len(states)
        assert found == {kind.name: kind.count(states) for kind in KINDS}

    @pytest.mark.parametrize(("unicode", "drawn"), [(True, "·░█23456789+p"), (False, EVERY)])
    def test_one_cell_a_block_in_order(self, unicode, drawn):
        """The rows carry the number of their first block."""
        grid = grid_of(frame(over_time(EVERY * 20), 85, 40, Style(unicode=unicode)))
        assert list(grid) == [0, 80, 160, 240]
        assert "".join(grid.values()) == drawn * 20

    def test_colours_tell_the_kinds_apart(self):
        (line,) = (line for line in frame(over_time(EVERY), 80, 40, Style(colour=True)) if line.startswith(" 0 "))
        cells = cells_of(line)[3:]
        assert [char for _, char in cells] == [*"·  23456789+p"]
        assert len({sgr for sgr, _ in cells}) == len(EVERY)
        assert [cells[at][0] for at in (0, 1, 2, 12)] == ["0;2", "0;48;5;110", "0;48;5;26", "0;97;48;5;162"]
        assert line.endswith("\x1b[0m")

    def test_many_blocks_a_cell(self):
        """The head says how many; a cell is what most of its blocks are, the free ones aside."""
        states = "." * 2000 + "c" * 2000 + "1" * 2000 + "2..." * 500
        lines = frame(over_time(states), 60, 24, Style(unicode=False))
        (blocks,) = map(int, re.findall(r"a cell is (\d+) blocks", "\n".join(lines)))
        grid = grid_of(lines)
        cells = "".join(grid.values())
        assert len(cells) == -(-len(states) // blocks)
        assert list(grid) == [blocks * 48 * row for row in range(len(grid))]
        assert re.fullmatch(r"\.+c?C+O+[oO]?s+", cells)
        assert "capitals: more than half of the cell" in "\n".join(lines)

    def test_shades_tell_how_full_a_cell_is(self):
        style = Style(colour=True)
        shades = [map_terminal._shaded("1" * full + "." * (8 - full), style)[1] for full in range(9)]
        assert shades == [*"·░▒▒▓▓███"]
        assert map_terminal._shaded("239.", style)[0] == "38;5;124"  # the colour for the most references

    def test_bars(self):
        assert map_terminal._bars([0, 0.001, 0.5, 1], 1, map_terminal._BARS) == [" ▁▄█"]
        assert map_terminal._bars([0, 0.25, 0.75, 1], 2, map_terminal._BARS) == ["  ▄█", " ▄██"]

    def test_a_peak_is_not_lost_where_a_curve_is_wider_than_the_terminal(self):
        values = [0.1] * 500 + [1.0] + [0.1] * 499
        assert map_terminal._fit(values, 40).count(1.0) == 1
        assert len(map_terminal._fit(values, 40)) == 40

    def test_the_curve_ends_with_the_current_sample(self):
        recording = over_time(*["1" * used + "c" + "." * (9 - used) for used in range(10)])
        text = "\n".join(frame(recording, 80, 40, Style()))
        assert re.search(r"used +[▁▂▃▄▅▆▇█ ]+ 90\.0%", text)
        assert re.search(r"cached ▇*[▁▂▃▄▅▆▇█]{10} 10\.0%", text)


class Page(HTMLParser):
    """The tags, the text outside scripts, and the content of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self.open = [], "", [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


class TestHtml:
    @pytest.mark.parametrize("states", ["1", "12c.p+1", EVERY * 20, EVERY * 7693])
    def test_the_page_holds_every_block(self, states):
        page = Page(map_html.page(over_time(states[::-1], states), "paged_llm at host:1"))
        data = json.loads(page.scripts[0])
        assert data["states"] == states
        assert data["colours"] == {state: colour_of(state) for state in EVERY}
        assert data["kinds"] == {state: kind_of(state).name for state in EVERY}
        assert counts_in(page.text) == {kind.name: kind.count(states) for kind in KINDS}
        assert "paged_llm at host:1" in page.text

    def test_it_needs_no_network(self):
        text = map_html.page(over_time("1", "."), "x")
        assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
        assert not any({"src", "href"} & attributes.keys() for _, attributes in Page(text).tags)

    def test_names_are_escaped_in_html(self):
        text = map_html.page(over_time("1"), '</script><b>"&@@DATA@@')
        page = Page(text)
        assert '</script><b>"&@@DATA@@' in page.text
        assert text.count("</script>") == 2
        assert [tag for tag, _ in page.tags].count("b") == len(KINDS)

    def test_data_cannot_close_the_script_element(self):
        evil = {"states": "</script><!--"}
        made = map_html._json_in_script(evil)
        assert "<" not in made
        assert json.loads(made) == evil

    def test_the_curve(self):
        """100 pixels or so high; half used, a quarter cached, then all used."""
        recording = Recording(
            pool_of("11c.", time=100.0, tokens=16),
            pool_of("....", time=101.0, tokens=0),
            pool_of("1111", time=102.0, tokens=64),
        )
        shapes = [
            (tag, attributes) for tag, attributes in Page(map_html.page(recording, "x")).tags if "points" in attributes
        ]
        cached, used, *filled = [
            [tuple(map(float, pair.split(","))) for pair in attributes["points"].split()] for _, attributes in shapes
        ]
        low, high = 156.0, 8.0
        assert [y for _, y in used[:3]] == [(low + high) / 2, low, high]
        assert [y for _, y in cached[:3]] == [low - 0.75 * (low - high), low, high]
        assert [[y for _, y in run] for run in filled] == [[(low + high) / 2], [high]]  # none where nothing is held
        assert used[0][0] < used[1][0] < used[2][0] == used[3][0]

    def test_one_sample_has_no_curve(self):
        assert "<svg" not in map_html.page(over_time("1"), "x")
        assert "<svg" in map_html.page(Recording(pool_of("1"), pool_of("1")), "x")  # in the same instant


class TestPng:
    @pytest.fixture(autouse=True)
    def matplotlib(self):
        pytest.importorskip("matplotlib")

    def draw(self, tmp_path, recording):
        from matplotlib.image import imread

        map_png.draw(recording, tmp_path / "map.png", "paged_llm at $host")
        return imread(tmp_path / "map.png")

    @pytest.mark.parametrize("states", ["1", "12c.p+1", EVERY * 20, EVERY * 7693])
    def test_it_shows_all_kinds(self, tmp_path, states):
        from matplotlib.colors import to_rgb

        image = self.draw(tmp_path, over_time(states[::-1], states, states))
        found = set(map(tuple, np.unique((255 * image[..., :3]).round().astype(int).reshape(-1, 3), axis=0).tolist()))
        assert {tuple(round(255 * part) for part in to_rgb(colour_of(state))) for state in EVERY} <= found

    def test_the_blocks_of_a_row_in_order(self, tmp_path):
        from matplotlib.colors import to_hex

        states = EVERY + "1c."
        image = self.draw(tmp_path, over_time(states))
        # Near the lower left corner of each cell, where no digit is: 0.3 inches each, at 120 dots an inch.
        seen = [to_hex(image[int(120 * 1.21), int(120 * (0.7 + 0.3 * block)) + 5][:3]) for block in range(len(states))]
        assert seen == [colour_of(state) for state in states]

    def test_a_curve_needs_more_than_one_sample(self, tmp_path):
        assert self.draw(tmp_path, over_time("1")).shape[0] < self.draw(tmp_path, over_time("1", "1")).shape[0]


def sent(pool):
    return json.dumps({name: getattr(pool, name) for name in PoolMap.__dataclass_fields__})


@pytest.fixture(params=SERVERS)
def fake(request):
    """A server with a pool that fills; `.flags` lead to it."""
    with SERVERS[request.param]() as seen:
        seen.maps += [sent(pool_of("1" * used + "c" + "." * (15 - used), time=100.0 + used)) for used in range(4)]
        yield SimpleNamespace(seen=seen, flags=["--protocol", request.param, "--url", seen.url])


class TestCommand:
    @pytest.mark.parametrize("flags", [[], ["--once"]])
    def test_one_sample_is_printed_without_colour(self, fake, capsys, flags):
        assert main(["map", *fake.flags, *flags]) == 0
        captured = capsys.readouterr()
        assert counts_in(captured.out) == {"free": 15, "cached": 1, "owned": 0, "shared": 0, "pinned": 0}
        assert "\x1b" not in captured.out
        assert captured.err == ""
        assert len(fake.seen.requests) == 1

    def test_the_curve_uses_all_samples_and_the_grid_the_last(self, fake, capsys):
        assert main(["map", *fake.flags, "--samples", "4", "--interval", "0.001"]) == 0
        captured = capsys.readouterr()
        assert "the last 3.0 s" in captured.out
        assert counts_in(captured.out)["owned"] == 3
        assert "sample 4 of 4: 3 of 16 blocks in use\n" in captured.err

    def test_files(self, fake, capsys, tmp_path):
        pytest.importorskip("matplotlib")
        png, html = tmp_path / "a.png", tmp_path / "a.html"
        flags = ["--samples", "2", "--interval", "0.001", "--png", str(png), "--html", str(html)]
        assert main(["map", *fake.flags, *flags]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.endswith(f"wrote {png}\nwrote {html}\n")
        assert png.read_bytes().startswith(b"\x89PNG")
        assert f"paged_llm at {fake.seen.url}" in html.read_text(encoding="utf-8")
        assert main(["map", *fake.flags, "--once", "--html", str(html)]) == 0
        assert counts_in(capsys.readouterr().out)["owned"] == 2

    def test_html_is_written_without_matplotlib(self, fake, capsys, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main(["map", *fake.flags, "--png", str(tmp_path / "a.png")]) == 2
        assert "--png: needs matplotlib" in capsys.readouterr().err
        assert fake.seen.requests == []
        assert main(["map", *fake.flags, "--html", str(tmp_path / "a.html")]) == 0

    def test_an_ascii_only_terminal(self, fake):
        command = [sys.executable, "-m", "client", "map", *fake.flags]
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=WAIT)
        assert b" 0 c..............." in done.stdout

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--png", "/nowhere/a.png"], "--png /nowhere/a.png: must be a file"),
            (["--html", "/tmp"], "--html /tmp: must be a file"),
            (["--timeout", "0"], "timeout=0.0"),
        ],
    )
    def test_wrong_usage_is_named(self, fake, capsys, flags, named):
        assert main(["map", *fake.flags, *flags]) == 2
        assert named in capsys.readouterr().err
        assert fake.seen.requests == []

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--interval", "0"], "must be a positive number of seconds"),
            (["--interval", "nan"], "must be a positive number of seconds"),
            (["--interval", "x"], "must be a positive number of seconds"),
            (["--samples", "0"], "must be a whole number, at least 1"),
            (["--samples", "1.5"], "must be a whole number, at least 1"),
            (["--samples", "²"], "must be a whole number, at least 1"),
        ],
    )
    def test_argparse_errors(self, capsys, flags, named):
        with pytest.raises(SystemExit, match="2"):
            main(["map", *flags])
        assert named in capsys.readouterr().err

    def test_errors_of_the_server(self, fake, capsys):
        fake.seen.maps[:] = ["UNAVAILABLE: the engine has stopped"]
        assert main(["map", *fake.flags]) == 1
        assert capsys.readouterr().err == "paged: UNAVAILABLE: the engine has stopped\n"


class Terminal:
    """`paged map` on a pseudo-terminal of its own."""

    def __init__(self, *arguments, columns, lines, **environment):
        self.fd, inside = pty.openpty()
        self.text = ""
        self.resize(columns, lines)
        # A shell's background jobs ignore SIGINT, and so would our child.
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        code += "from client.cli import main; sys.exit(main())"
        names = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "map", *arguments],
            cwd=ROOT,
            env=names | {"PYTHONIOENCODING": "utf-8"} | environment,
            stdin=inside,
            stdout=inside,
            stderr=subprocess.PIPE,
        )
        os.close(inside)

    def resize(self, columns, lines):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, pattern):
        """All that came up to and with `pattern`; what is after it is kept for the next."""
        while not (found := re.search(pattern, self.text, re.S)):
            self.text += os.read(self.fd, 65536).decode()
        head, self.text = self.text[: found.end()], self.text[found.end() :]
        return head

    def end(self):
        """(exit code, what was still written, standard error)"""
        _, err = self.process.communicate(timeout=WAIT)
        try:
            while more := os.read(self.fd, 65536):
                self.text += more.decode()
        except OSError:  # Linux reports a closed terminal this way
            pass
        os.close(self.fd)
        return self.process.returncode, self.text, err.decode()


class TestLive:
    def test_frames_are_redrawn_in_place_until_ctrl_c(self, fake):
        terminal = Terminal(*fake.flags, "--interval", "0.01", columns=60, lines=20)
        first = terminal.read_until(r"\x1b\[J")
        assert first.startswith("\x1b[?1049h\x1b[?25l\x1b[H16 blocks of 16 tokens")
        assert "\x1b[0;48;5;110m" in first
        assert terminal.read_until(r"\x1b\[J").startswith("\x1b[H16 blocks")
        terminal.read_until(r"3 owned")
        terminal.process.send_signal(signal.SIGINT)
        code, text, err = terminal.end()
        assert (code, err) == (130, "")
        assert text.endswith("\x1b[?25h\x1b[?1049l")

    def test_a_resized_window_is_redrawn_at_once(self, fake):
        terminal = Terminal(*fake.flags, "--interval", "1000", columns=60, lines=20)
        assert " 0 " in terminal.read_until(r"\x1b\[J")
        terminal.resize(9, 20)
        rows = re.split(r"[\r\n]+", terminal.read_until(r"\x1b\[J"))
        assert max(len(re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", row)) for row in rows) == 8
        assert len(fake.seen.requests) == 1
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end()[0] == 130

    def test_no_color_is_honoured(self, fake):
        terminal = Terminal(*fake.flags, "--interval", "0.01", columns=60, lines=20, NO_COLOR="1")
        assert not SGR.search(terminal.read_until(r"\x1b\[J.*\x1b\[J"))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end()[0] == 130

    def test_the_terminal_is_restored_when_the_server_goes_away(self, fake):
        fake.seen.maps[1:] = ["UNAVAILABLE: the engine has stopped"]
        terminal = Terminal(*fake.flags, "--interval", "0.01", columns=60, lines=20)
        code, text, err = terminal.end()
        assert (code, err) == (1, "paged: UNAVAILABLE: the engine has stopped\n")
        assert text.endswith("\x1b[?25h\x1b[?1049l")

    def test_once_on_a_terminal_has_no_escape_codes(self, fake):
        terminal = Terminal(*fake.flags, "--once", columns=60, lines=20)
        code, text, err = terminal.end()
        assert (code, err) == (0, "")
        assert "\x1b" not in text and "16 blocks of 16 tokens" in text


def test_shared_blocks_get_darker_colours():
    brightness = [sum(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in SHARED_COLOURS.values()]
    assert brightness == sorted(brightness, reverse=True)
