"""Options of benchmarks."""

from paged_bench._report import arguments, parser


def test_explicit_options_override_quick():
    made = parser("engine", "")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--requests", type=int)

    def chosen(*argv):
        args = arguments(made, argv, {"rounds": 1, "requests": 4})
        return args.rounds, args.requests

    assert chosen() == (3, None)
    assert chosen("--quick") == (1, 4)
    assert chosen("--quick", "--rounds", "3") == (3, 4)
    assert chosen("--requests", "9", "--quick") == (1, 9)
