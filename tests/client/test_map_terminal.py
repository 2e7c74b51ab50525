"""Pictures of the block pool on a terminal."""

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from paged_client import map_terminal
from paged_client.map_terminal import Style, frame
from paged_client.map_view import KINDS, Recording
from tests.support.fake_servers import WAIT
from tests.support.map_views import EVERY, SGR, counts_in, over_time, pool_of

ROOT = Path(__file__).parents[2]

STYLES = [Style(), Style(unicode=False), Style(colour=True), Style(colour=True, unicode=False)]


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

    def test_a_sleeping_model_is_asleep(self):
        recording = Recording(pool_of("..", sleeping=True))
        assert any("  asleep" in line for line in frame(recording, 200, 40, Style()))

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


class Terminal:
    """`paged map` on a pseudo-terminal of its own."""

    def __init__(self, *arguments, columns, lines, **environment):
        self.fd, inside = pty.openpty()
        self.text = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()  # a read can end within a character
        self.resize(columns, lines)
        # A shell's background jobs ignore SIGINT, and so would our child.
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        code += "from paged_client.cli import main; sys.exit(main())"
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
            self.text += self.decoder.decode(os.read(self.fd, 65536))
        head, self.text = self.text[: found.end()], self.text[found.end() :]
        return head

    def end(self):
        """(exit code, what was still written, standard error)"""
        # Read before waiting: the process blocks when the terminal is full, and then never exits.
        try:
            while more := os.read(self.fd, 65536):
                self.text += self.decoder.decode(more)
        except OSError:  # Linux reports a closed terminal this way
            pass
        _, err = self.process.communicate(timeout=WAIT)
        os.close(self.fd)
        return self.process.returncode, self.text, err.decode()


class TestLive:
    def test_frames_are_redrawn_in_place_until_ctrl_c(self, map_fake):
        terminal = Terminal(*map_fake.flags, "--interval", "0.01", columns=60, lines=20)
        first = terminal.read_until(r"\x1b\[J")
        assert first.startswith("\x1b[?1049h\x1b[?25l\x1b[H16 blocks of 16 tokens")
        assert "\x1b[0;48;5;110m" in first
        assert terminal.read_until(r"\x1b\[J").startswith("\x1b[H16 blocks")
        terminal.read_until(r"3 owned")
        terminal.process.send_signal(signal.SIGINT)
        code, text, err = terminal.end()
        assert (code, err) == (130, "")
        assert text.endswith("\x1b[?25h\x1b[?1049l")

    def test_a_resized_window_is_redrawn_at_once(self, map_fake):
        terminal = Terminal(*map_fake.flags, "--interval", "1000", columns=60, lines=20)
        assert " 0 " in terminal.read_until(r"\x1b\[J")
        terminal.resize(9, 20)
        rows = re.split(r"[\r\n]+", terminal.read_until(r"\x1b\[J"))
        assert max(len(re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", row)) for row in rows) == 8
        assert len(map_fake.seen.requests) == 1
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end()[0] == 130

    def test_no_color_is_honoured(self, map_fake):
        terminal = Terminal(*map_fake.flags, "--interval", "0.01", columns=60, lines=20, NO_COLOR="1")
        assert not SGR.search(terminal.read_until(r"\x1b\[J.*\x1b\[J"))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end()[0] == 130

    def test_the_terminal_is_restored_when_the_server_goes_away(self, map_fake):
        map_fake.seen.maps[1:] = ["UNAVAILABLE: the engine has stopped"]
        terminal = Terminal(*map_fake.flags, "--interval", "0.01", columns=60, lines=20)
        code, text, err = terminal.end()
        assert (code, err) == (1, "paged: UNAVAILABLE: the engine has stopped\n")
        assert text.endswith("\x1b[?25h\x1b[?1049l")

    def test_once_on_a_terminal_has_no_escape_codes(self, map_fake):
        terminal = Terminal(*map_fake.flags, "--once", columns=60, lines=20)
        code, text, err = terminal.end()
        assert (code, err) == (0, "")
        assert "\x1b" not in text and "16 blocks of 16 tokens" in text
