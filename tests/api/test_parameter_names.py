"""Names of other engines for sampling parameters."""

from dataclasses import fields

from paged_backend.api.parameter_names import OTHER_NAMES, suggestion
from paged_backend.api.sampling_params import SamplingParams

NAMES = {spec.name for spec in fields(SamplingParams)}


def test_replacements_are_parameters_of_this_engine():
    assert {name for names in OTHER_NAMES.values() for name in names} <= NAMES
    assert not OTHER_NAMES.keys() & NAMES


def test_suggestion():
    assert suggestion("guided_json", NAMES) == "use json_schema instead"
    assert suggestion("guided_json", {"guided_jsn"}) == "did you mean guided_jsn?", "a name that is known here"
    assert suggestion("temprature", NAMES) == "did you mean temperature?"
    assert suggestion("frobnicate", NAMES) is None
