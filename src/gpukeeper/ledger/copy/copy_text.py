"""Journal lines in the text format of COPY. Pure. SQLite writes most of them itself, which is much faster.

PostgreSQL stores no NUL: neither as a character nor, in jsonb, as \\u0000. Both become the replacement character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpukeeper.ledger.lines import COLUMNS

NULL = "\x01"  # an owner or a name of this one character reads as NULL; in exchange one replace does for a whole row
_NUL_IN_JSON = re.compile(r"(?<!\\)((?:\\\\\\\\)*)\\\\u0000")  # in COPY text every backslash of JSON is two
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\ufffd"})
_OR_NULL = [f"coalesce({column}, char(1))" for column in COLUMNS[:-1]]

# An expression over the table `journal`: one row as a line of COPY, if no name in it has a tab or a line break (JSON
# has none).
SQLITE_ROW = f"replace({' || char(9) || '.join(['seq', *_OR_NULL, 'line'])}, '\\', '\\\\')"
TARGET_COLUMNS = ("line", *COLUMNS[:-1], "body")


def is_plain(row: str) -> bool:
    """Whether SQLITE_ROW gave a row with all its columns and no more."""
    return row.count("\t") == len(COLUMNS) and "\n" not in row and "\r" not in row


def without_nul(row: str) -> str:
    """A line of COPY that PostgreSQL can store."""
    if "\0" in row:
        row = row.replace("\0", "\ufffd")
    return _NUL_IN_JSON.sub(r"\1\\\\ufffd", row) if "\\\\u0000" in row else row


def copy_row(values: Sequence[object], null: str = NULL) -> str:
    """Values of one row, whatever is in them; None is NULL."""
    return "\t".join(null if value is None else str(value).translate(_ESCAPES) for value in values)
