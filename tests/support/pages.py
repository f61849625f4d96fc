"""HTML as a strict reader sees it: every element closed in order, and what the page refers to."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """The elements and the text of a page; refuses one that is not balanced.

    Attributes:
        elements: (name, attributes) in order.
        texts: the text of the page in order, without that of its style.
        styles: the texts of its styles.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.styles, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(f"<{tag}/> is not HTML")

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing that is open last"

    def handle_data(self, data):
        if "style" in self._open:
            self.styles.append(data)
            return
        self.texts.append(data)

    @property
    def text(self):
        """All text of the page."""
        return "".join(self.texts)


def assert_self_contained(text):
    """A page that loads nothing, runs nothing, and whose inner references lead somewhere."""
    page = Page(text)
    names = [each["id"] for _, each in page.elements if "id" in each]
    assert len(names) == len(set(names)), "an id stands twice"
    for tag, given in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        assert not any(name.startswith("on") for name in given), (tag, given)
        assert "src" not in given, given
        for name in ("href", "xlink:href"):
            if name in given:
                assert given[name].startswith("#") and given[name][1:] in names, given
        if "aria-labelledby" in given:
            assert given["aria-labelledby"] in names
    for style in page.styles + [given.get("style", "") for _, given in page.elements]:
        assert not re.search(r"@import|url\((?!#)", style)
    return page
