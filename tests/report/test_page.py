"""The report's page: its plots, and that it loads nothing."""

import html.parser
import re

import pytest

from fugaku_megatron.report.figures import text
from fugaku_megatron.report.page import page
from tests.checks.reports import HEALTHY, report
from tests.file_damage import changed

pytestmark = pytest.mark.unit


class Tags(html.parser.HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_the_page_has_the_text_and_plots_and_loads_nothing():
    tags = Tags()
    data = report()
    found = page(data)
    tags.feed(found)
    assert html.escape(text(data)) in found
    assert tags.tags.count("svg") == 5
    assert not {"src", "href", "srcset"} & set(tags.attributes)
    assert not {"script", "link", "img"} & set(tags.tags)
    assert "url(" not in found
    assert set(re.findall(r"https?://[^\"]*", found)) == {"http://www.w3.org/2000/svg"}
    assert "model (extrapolated)" in found and "nan" not in found


def test_the_page_escapes_names():
    assert "&lt;b&gt;" in page(report(changed(HEALTHY, "host/nodes/0/cpu", "<b>")))
