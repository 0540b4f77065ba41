"""Makes the pictures in docs/pictures/site: the built site in Chromium, light and dark (`make docs browser-setup`)."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import browser  # noqa: E402

PAGES = {"home": "", "conversations": "guide/conversations/"}
WIDTHS = (1300, 500)
HEIGHT = 1000


def main() -> None:
    """Every page, scheme and width; ends with 1 where a page's console complains."""
    pictures = ROOT / "docs" / "pictures" / "site"
    pictures.mkdir(exist_ok=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(ROOT / "build" / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser() as tab:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, page in PAGES.items():
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    tab.look(width, height=HEIGHT, dark=scheme == "dark")
                    tab.open(f"http://127.0.0.1:{server.server_port}/{page}")
                    file = pictures / f"{name}-{scheme}-{width}.png"
                    tab.picture(file, height=HEIGHT, scale=0.6, beyond=False)
        server.shutdown()
        if tab.problems:
            raise SystemExit("\n".join(tab.problems))


if __name__ == "__main__":
    main()
