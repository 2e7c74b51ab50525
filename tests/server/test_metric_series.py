"""Values of gauges and counters in the scheduler's statistics."""

from dataclasses import replace

from paged_backend.server.metric_definitions import FAMILIES
from paged_backend.server.metric_series import COUNTERS, GAUGES
from tests.support.streams import STATS


def test_series_belong_to_families_of_their_kind():
    for kind, series in (("GAUGE", GAUGES), ("COUNTER", COUNTERS)):
        assert {FAMILIES[one.family].kind for one in series} == {kind}


def test_state_slots():
    stats = replace(
        STATS,
        state_slots_total=9,
        state_slots_used=3,
        state_checkpoints=4,
        host_state_slots_total=5,
        host_state_slots_used=1,
    )
    values = {(one.family, one.labels.get("state")): one.value(stats) for one in GAUGES}
    assert [values["paged_state_slots", state] for state in ("total", "used", "checkpoint", "free")] == [9, 3, 4, 2]
    assert [values["paged_host_state_slots", state] for state in ("total", "used")] == [5, 1]
