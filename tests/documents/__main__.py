"""python -m tests.documents: makes the generated parts of the pages again, and names the pages that changed."""

from __future__ import annotations

from tests.documents import docstrings, rewrites
from tests.documents.parts import DOCUMENTS, ROOT, Maker, refreshed

MAKERS: dict[str, Maker] = {
    "rewrite": rewrites.example,
    "reference": docstrings.reference,
    "options": docstrings.options,
}


def main() -> None:
    for page in DOCUMENTS:
        text = page.read_text()
        if (new := refreshed(text, MAKERS)) != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} changed")


if __name__ == "__main__":
    main()
