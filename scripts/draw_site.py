"""Makes the pictures in docs/pictures/site: the built site in Chromium, light and dark (`make docs browser-setup`)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import browser  # noqa: E402

PAGES = {"home": "index.html", "conversations": "guide/conversations/index.html"}
WIDTHS = (1300, 500)
HEIGHT = 1000


def main() -> None:
    """Every page, scheme and width; ends with 1 where a page's console complains."""
    pictures = ROOT / "docs" / "pictures" / "site"
    pictures.mkdir(exist_ok=True)
    with browser() as tab:
        for name, page in PAGES.items():
            for width in WIDTHS:
                for dark in (False, True):
                    tab.look(width, height=HEIGHT, dark=dark)
                    tab.open((ROOT / "build" / "site" / page).as_uri())
                    scheme = "dark" if dark else "light"
                    tab.picture(pictures / f"{name}-{scheme}-{width}.png", height=HEIGHT, scale=0.6)
        if tab.problems:
            raise SystemExit("\n".join(tab.problems))


if __name__ == "__main__":
    main()
