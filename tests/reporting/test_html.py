"""What is written into a page comes out as the text it was, and as nothing else."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from shardkit.reporting.page import document
from support.pages import assert_self_contained

pytestmark = pytest.mark.check
NAMES = st.text(st.characters(), min_size=1, max_size=40)


def shown(text):
    """What a reader gets of a text: what a page cannot hold is replaced."""
    kept = "".join("\ufffd" if not re.match(r"[\t\n -~\u00a0-\ud7ff\ue000-\U0010ffff]", c) else c for c in text)
    return re.sub("[\ufdd0-\ufdef]", "\ufffd", "".join("\ufffd" if ord(c) & 0xFFFE == 0xFFFE else c for c in kept))


# Alone catches a name that becomes markup, also inside an attribute.
@given(NAMES)
@example("<script>alert(1)</script>")
@example('"><img src=x onerror=alert(1)>')
@example("' onload='alert(1)")
@example("&lt;b&gt; \x00 \ud800 \uffff \x85")
@example("]]></style><!--")
def test_no_name_becomes_markup(name):
    text = document(name, {name: name})
    page = assert_self_contained(text)
    text.encode("utf-8")
    [box] = [given for tag, given in page.elements if tag == "pre"]
    assert box["aria-label"] == shown(name) and page.text.count(shown(name)) >= 4
