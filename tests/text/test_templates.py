"""The check of the chat template when a model is loaded."""

import pytest

from paged_backend.text import templates
from paged_backend.text.templates import check_template
from tests.support.in_process import WAIT
from tests.support.tokenizers import ENDLESS, with_template


@pytest.mark.parametrize(
    ("template", "seconds", "reason"),
    [
        ("{% if %}", WAIT, "is not valid Jinja: line 1"),
        (ENDLESS + "{% endfor %}", 0.2, r"does not end within 0\.2 s \(chat_template_timeout\)"),
        ("x" * (templates.MAX_TEMPLATE_CHARS + 1), WAIT, "must be a text of at most"),
        ({"default": "x", "tools": 5}, WAIT, "must be a text of at most"),
    ],
)
def test_an_unusable_template_is_rejected_at_load(template, seconds, reason):
    with pytest.raises(ValueError, match=reason):
        check_template(with_template(template), seconds)


@pytest.mark.parametrize("template", [None, "x", "{{ raise_exception('two turns, please') }}", "{{ messages[1].x }}"])
def test_a_template_that_rejects_the_probe_is_accepted(template):
    check_template(with_template(template), WAIT)
