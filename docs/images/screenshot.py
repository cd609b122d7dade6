"""Take the picture of a page of Airflow's UI: needs Playwright (requirements-dev.txt) and a Chromium.

``python docs/images/screenshot.py URL PASSWORDS TEXT IMAGE``: the picture is taken once the page shows the text.
``tests/chaos/test_backfill.py`` takes ``backfill.png`` with it if RINGSYNC_SCREENSHOT names the file.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

WAIT_MS = 60_000
SETTLED_MS = 2_000


def token(url: str, username: str, password: str) -> str:
    """Log in to Airflow, and return the token."""
    body = json.dumps({"username": username, "password": password}).encode()
    asked = urllib.request.Request(f"{url}/auth/token", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(json.load(answer)["access_token"])


def take(page_url: str, login: tuple[str, str], text: str, image: Path, browser: str) -> None:
    """Open a page as a logged-in user, and take its picture.

    :param text: what the page must show first
    :param browser: path of the Chromium
    """
    parts = urlsplit(page_url)
    server = f"{parts.scheme}://{parts.netloc}"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        context = chromium.new_context(viewport={"width": 1280, "height": 640}, color_scheme="light")
        context.add_cookies([{"name": "_token", "value": token(server, *login), "url": server}])
        page = context.new_page()
        page.goto(page_url, timeout=WAIT_MS)
        page.get_by_text(text).first.wait_for(timeout=WAIT_MS)
        page.wait_for_timeout(SETTLED_MS)
        page.screenshot(path=image)
        chromium.close()


def main() -> None:
    """Read the arguments, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the page")
    parser.add_argument(
        "passwords", type=Path, help="JSON file of user name and password, as servers/airflow.py writes it"
    )
    parser.add_argument("text", help="what the page must show first")
    parser.add_argument("image", type=Path, help="file to write, PNG")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="path of the Chromium")
    given = parser.parse_args()
    (login,) = json.loads(given.passwords.read_text()).items()
    take(given.url, login, given.text, given.image, given.browser)


if __name__ == "__main__":
    main()
