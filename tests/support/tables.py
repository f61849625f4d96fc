"""Tables that are written as text, for rows of long sentences."""


def indented(text: str) -> list[list[str]]:
    """The rows of a table: a line, and what is indented below it as one line; # begins a comment."""
    rows: list[list[str]] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            rows[-1][1] = f"{rows[-1][1]} {line.strip()}".lstrip()
        elif not line.startswith("#"):
            rows.append([line, ""])
    return rows
