"""Errors of Ferry."""
import json
import re
from typing import List


class Error(Exception):
    """An error that Ferry reports.

    Attributes:
        kind: "usage" (impossible arguments), "not_found", "corrupt" (bytes that contradict themselves or their format), "layout" (shapes, dtypes or
            layouts that do not fit together), "io" (the operating system refused), "device", "cancelled" (a progress callback returned False) or "bug"
        message: the subject, and what is wrong with it
        context: what was being done, innermost first
        hint: what to do about it, or ""
    """

    kind: str
    message: str
    context: List[str]
    hint: str

    def __init__(self, kind: str, message: str, context: List[str] = [], hint: str = ""):
        super().__init__(kind, message, context, hint)
        self.kind, self.message, self.context, self.hint = kind, message, list(context), hint

    def __str__(self) -> str:
        lines = [self.message, *(f"  while {frame}" for frame in self.context)]
        return "\n".join(lines + [f"hint: {self.hint}"] if self.hint else lines)


Error.__module__ = "ferry"


def _in_keywords(text: str) -> str:
    """-> the text with the program's options as the keywords that they are here: "max_memory" of "--max-memory\""""
    return re.sub(r"(?<![\w/.-])--([a-z][a-z-]*[a-z])", lambda found: found[1].replace("-", "_"), text)


def from_json(text: str) -> Error:
    error = json.loads(text)["error"]
    return Error(error["kind"], _in_keywords(error["message"]), [_in_keywords(frame) for frame in error["context"]], _in_keywords(error["hint"]))
