"""The cases of the benchmark of structured outputs are what they say."""

import re

import pytest

from paged_bench._guided_cases import EXPRESSIONS, SCHEMAS


@pytest.mark.parametrize("case", EXPRESSIONS, ids=lambda case: case.name)
def test_texts_match_their_expression_or_do_not(case):
    assert [text for text in case.good if not re.fullmatch(case.text, text)] == []
    assert [text for text in case.bad if re.fullmatch(case.text, text)] == []


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in [*SCHEMAS, *EXPRESSIONS]]
    assert len(set(names)) == len(names)
