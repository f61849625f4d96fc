"""What is written into a page comes out as the text it was, and as nothing else."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from shardkit.reporting.html import STYLE, bars, document, element, escaped, figures, part, sections, table
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
    content = figures([(name, name)]), table(name, (name, "n"), [(name, name)], bars=bars([1]))
    text = document(name, "p { margin: 0 }", sections([part("One", *content, element("p", name, title=name))]))
    page = assert_self_contained(text)
    text.encode("utf-8")
    assert page.tables == [[[shown(name), "n", ""], [shown(name), shown(name), ""]]]
    [paragraph] = [given for tag, given in page.elements if tag == "p"]
    assert paragraph["title"] == shown(name) and page.text.count(shown(name)) >= 6


def test_what_is_html_already_is_not_escaped_again():
    assert escaped(element("b", "a < b")) == "<b>a &lt; b</b>" and escaped("<b>") == "&lt;b&gt;"
    assert element("br") == "<br>" and element("p", class_=None) == "<p></p>"


def test_bars_are_shares_of_the_largest():
    assert bars([1, 4, 0]) == [0.25, 1.0, 0.0] and bars([0, 0]) == [0.0, 0.0] and bars([]) == []


def contrast(one, other):
    """The ratio of the luminances of two colors (WCAG 2.2)."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


# Alone catches a color that cannot be read, of the light page or of the dark one.
def test_texts_can_be_read():
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root {[^}]*}", STYLE)[:2]]
    for theme in themes:
        for text in ("ink", "quiet", "good", "bad", "mark"):
            assert min(contrast(theme[text], theme[back]) for back in ("paper", "box")) >= 4.5, (text, theme)
