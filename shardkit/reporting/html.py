"""Texts as a page of HTML: whatever they hold is escaped, so that no name of a user can become markup."""

from __future__ import annotations

import html
from collections.abc import Mapping

# As light or dark as the reader's system is; tables scroll inside their box, and break their lines on paper.
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 90rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
pre { margin: 0; padding: .75rem; overflow-x: auto; border: 1px solid; border-radius: .4rem; font-size: .8125rem; }
@media print { body { max-width: none; padding: 0; } pre { white-space: pre-wrap; font-size: 7.5pt; } }
"""
# Neither scripts, nor anything that is not in the page itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def escaped(value: object) -> str:
    """A value as text of a page. Control characters and lone surrogates, which a page cannot hold, are replaced."""
    text = "".join(c if c in "\n\t" or (c >= " " and not _forbidden(ord(c))) else "\ufffd" for c in str(value))
    return html.escape(text)


def _forbidden(code: int) -> bool:
    return 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


def document(title: str, parts: Mapping[str, str]) -> str:
    """A whole page: its title, and each text below its heading, whose lines are kept."""
    body = "".join(
        f"<h2>{escaped(name)}</h2>\n"
        f'<pre tabindex="0" role="region" aria-label="{escaped(name)}">{escaped(text)}</pre>\n'
        for name, text in parts.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{escaped(title)}</h1>\n{body}</main></body></html>\n"
    )
