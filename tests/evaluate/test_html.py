"""The page: whole by itself, and safe whatever the prompts hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from dgcompile.evaluate.html import render_html
from tests.evaluate.conftest import hand_made_report

HOSTILE = '</pre><script>alert(1)</script><img src="http://evil.example/x"> {{ 7 * 7 }} & "\''


class Elements(HTMLParser):
    """Start tags with their attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(hand_made_report())


def test_the_page_needs_nothing_else(page: str) -> None:
    elements = Elements(page)
    assert elements.open == []  # every element is closed
    assert {tag for tag, _ in elements.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base", "image"})
    for _, attributes in elements.tags:
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action", "xmlns") and not name.startswith("on")
            if name.endswith("href"):
                assert value is not None and value.startswith("#")
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_references_inside_the_page_lead_somewhere(page: str) -> None:
    elements = Elements(page)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 0
    used = [value for _, attributes in elements.tags for name, value in attributes.items() if name.endswith("href")]
    used += re.findall(r"url\((#[^)]*)\)", page)
    assert used and {value.removeprefix("#") for value in used if value} <= set(ids)


def test_the_page_shows_tables_and_four_plots(page: str) -> None:
    elements = Elements(page)
    assert [tag for tag, _ in elements.tags].count("svg") == 4
    for shown in ("KL by denoising step", "Denoising steps per canvas", "Bytes of the weights", "1.50e-02", "experts"):
        assert shown in elements.text
    # Drawn in the page's own colour, so that it can be read in light and dark.
    assert "currentColor" in page and "#010203" not in page and "color-scheme" in page


def test_texts_are_escaped() -> None:
    page = render_html(hand_made_report(HOSTILE, folder=HOSTILE))
    elements = Elements(page)
    assert {"script", "img"}.isdisjoint(tag for tag, _ in elements.tags)
    assert elements.text.count(HOSTILE) >= 3  # title, facts and prompts, as they are


def test_equal_reports_give_equal_pages(page: str) -> None:
    assert render_html(hand_made_report()) == page


def test_a_perfect_bundle_can_be_drawn() -> None:
    report = hand_made_report()
    same = [step.model_copy(update={"kl": 0.0, "relative_error": 0.0}) for step in report.steps[:1]]
    assert "<svg" in render_html(report.model_copy(update={"steps": tuple(same)}))
