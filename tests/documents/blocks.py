"""The Python of the pages, run: `python -m tests.documents.blocks` in a folder where files may be written.

All blocks of a page share one namespace, in order. Two comments that a reader does not see change that:

    <!-- first: ... -->           Python that stands in front of the next block, such as the model that it optimizes.
    <!-- only compiled: why -->   The next block needs what a test has not, a GPU for example.
"""

from __future__ import annotations

import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.documents.parts import DOCUMENTS, ROOT

_BLOCK = re.compile(
    r"^(?:<!-- first:\n(?P<first>.*?)-->|<!-- only compiled: (?P<why>[^\n]+) -->|"
    r"(?P<indent> *)```python\n(?P<code>.*?)^ *```)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """Python of a page at a line. why: the reason why it is compiled and not run ("" where it runs)."""

    page: str
    line: int
    code: str
    why: str = ""

    def compiled(self) -> object:
        return compile("\n" * self.line + self.code, self.page, "exec")


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, and what stands in front of them, in order."""
    text, name, why = page.read_text(), str(page.relative_to(ROOT)), ""
    for found in _BLOCK.finditer(text):
        if found["why"]:
            why = found["why"]
            continue
        group = "first" if found["first"] else "code"
        line = text[: found.start(group)].count("\n")
        yield Block(name, line, textwrap.dedent(found[group]), why)
        why = ""


def main() -> int:
    """Runs every block that may run; prints what failed, with its page and line. The number of failures."""
    failures = 0
    for page in DOCUMENTS:
        namespace = {"__name__": "__page__"}
        for block in blocks(page):
            code = block.compiled()
            if block.why:
                continue
            try:
                exec(code, namespace)  # what the page tells its readers to run
            except Exception:
                failures += 1
                print(f"{block.page}, line {block.line + 1}:", file=sys.stderr)
                traceback.print_exc()
                break
    return failures


if __name__ == "__main__":
    sys.exit(main())
