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
        tables: of each table its rows, each a list of the texts of its cells.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.styles, self.tables, self._open = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self._open, f"<{tag}/> is not HTML"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing that is open last"

    def handle_data(self, data):
        if "style" in self._open:
            self.styles.append(data)
            return
        self.texts.append(data)
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        """All text of the page."""
        return "".join(self.texts)

    def column(self, head, table):
        """The texts below a heading of a table."""
        at = self.tables[table][0].index(head)
        return [row[at] for row in self.tables[table][1:]]


def assert_self_contained(text):
    """A page that loads nothing, runs nothing, and whose inner references lead somewhere."""
    page = Page(text)
    names = [each["id"] for _, each in page.elements if "id" in each]
    assert len(names) == len(set(names)), "an id stands twice"
    for tag, given in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        assert not any(name.startswith("on") for name in given), (tag, given)
        if "src" in given or tag == "img":
            assert (
                tag == "img"
                and given["src"].startswith(("data:image/png;base64,", "data:image/svg+xml;base64,"))
                and given["alt"]
            )
        for name in ("href", "xlink:href"):
            if name in given:
                assert given[name].startswith("#") and given[name][1:] in names, given
        if "aria-labelledby" in given:
            assert given["aria-labelledby"] in names
        if tag == "svg":
            assert given["role"] == "img" and given["aria-label"]
    for style in page.styles + [given.get("style", "") for _, given in page.elements]:
        assert not re.search(r"@import|url\((?!#)", style)
    return page
