"""Tests of the HTML report: what it has, what it never has, how a browser shows it."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tests.kit.cluster import Cluster
from tests.report import records
from tests.report.browser import Browser, find_browser, started
from tfcluster.commands.report_trace import html
from tfcluster.console.text import byte_size, clock
from tfcluster.record.paths import RunPaths
from tfcluster.report.charts import ChartLine, Point, downsampled, line_chart
from tfcluster.report.html import element
from tfcluster.report.page import without_values

KINDS = {
    "failed": records.failed,
    "plain": records.plain,
    "lost": records.lost,
    "empty": records.empty,
}
T = records.T


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of each kind of run."""
    state = tmp_path_factory.mktemp("reports") / "state"
    found = {}
    for kind, make in KINDS.items():
        paths: RunPaths = make(state)
        found[kind] = state.parent / f"{kind}.html"
        environ = {"TFCLUSTER_STATE_DIR": str(state)}
        found[kind].write_text(html(paths.run, environ), encoding="utf-8")
    return found


class Elements(HTMLParser):
    """All start tags of a page, and its text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_markup_and_nothing_is_loaded(
    pages: dict[str, Path], kind: str
) -> None:
    page = Elements(pages[kind])
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "link", "base"}
    (policy,) = (
        each["content"]
        for tag, each in page.tags
        if tag == "meta" and each.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "srcset", "data", "action", "poster"):
            assert name not in attributes
        target = attributes.get("href", "#")
        assert target is not None
        assert target.startswith("#"), target
        assert not re.search(r"url\((?!#|&quot;#)", attributes.get("style") or "")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", pages[kind].read_text("utf-8"))


def test_a_failed_run_tells_everything(pages: dict[str, Path]) -> None:
    page = Elements(pages["failed"])
    shown = "<script>alert(1)</script>$x^{$"
    for text in (
        "First failure",
        "</pre><img src=x>",
        "worker:0 waits least",
        "validation",
        "GPU memory",
        "1 note",
        "TOKEN",
        "0.2.0",
    ):
        assert text in page.text
    assert page.text.count(shown) > 10
    assert "not to be shown" not in page.text
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) >= 9
    assert all(each["role"] == "img" and each["aria-label"] for each in pictures)
    ids = [each["id"] for tag, each in page.tags if each.get("id") and tag == "section"]
    assert ids == [
        "failures",
        "tasks",
        "training",
        "speed",
        "usage",
        "exchanges",
        "hosts",
        "configuration",
    ]
    headed = [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert headed[0] == "h1"
    assert headed.count("h1") == 1


def test_other_runs_tell_what_is_known(pages: dict[str, Path]) -> None:
    plain = Elements(pages["plain"]).text
    assert "this run has reported none" in plain
    assert "10.0 MB" in plain
    assert "Steps per second" not in plain
    assert "lost" in Elements(pages["lost"]).text
    assert "The record has no tasks" in Elements(pages["empty"]).text


@pytest.mark.slow
def test_many_ranks_make_a_small_page(tmp_path: Path) -> None:
    paths = records.failed(tmp_path / "state", text="x", tasks=50, steps=12)
    made = html(paths.run, {"TFCLUSTER_STATE_DIR": str(tmp_path / "state")})
    assert "worker:0 (lowest)" in made
    assert "48 others" in made
    assert len(made) < 1_500_000


def test_a_long_line_is_drawn_by_its_extremes() -> None:
    points = [(float(i), float(i % 1000)) for i in range(100_000)]
    found = downsampled([*points, (1e5, 5000.0), (1e5 + 1, None)], 400)
    assert len(found) <= 402
    assert (1e5, 5000.0) in found
    assert found == sorted(found, key=lambda point: point[0])
    assert downsampled(points[:10], 400) == points[:10]


def _texts(picture: ET.Element) -> list[str]:
    return [each.text or "" for each in picture.iter("text")]


@pytest.mark.parametrize("last", [0.4, 3.0, 59.0, 4_000.0])
def test_labels_of_ticks_differ(last: float) -> None:
    line = ChartLine("a", [(0.0, 1_000_000.0), (last, 1_000_001.0)])
    drawn = line_chart(
        [line],
        x="x",
        y="y",
        alt="",
        x_text=clock,
        y_text=lambda size: byte_size(int(size)),
    )
    texts = _texts(drawn)
    assert len(set(texts)) == len(texts)
    assert "0:00" in texts
    assert "1.0 MB" in texts


def test_a_point_without_neighbours_is_seen() -> None:
    """Each epoch of a short run may have one sample."""
    gap: Point = (0.0, None)
    line = ChartLine("a", [(0.0, 1.0), gap, (1.0, 2.0), (2.0, 2.5), gap, (3.0, 3.0)])
    drawn = line_chart([line], x="step", y="", alt="")
    style = "fill: var(--c0)"
    marks = [each for each in drawn.iter("use") if style in each.get("style", "")]
    assert len(marks) == 2


def test_elements_escape_and_show_what_is_invisible() -> None:
    made = element("p", "a<b>", element("i", "x"), " & \x1b\u202e", title='"><x>')
    text = ET.tostring(made, encoding="unicode", method="html")
    assert text == (
        '<p title="&quot;&gt;<x&gt;">a&lt;b&gt;<i>x</i> &amp; \\x1b\\u202e</p>'
    )


def test_values_of_variables_are_left_out_wherever_they_are() -> None:
    settings = {"env": {"A": "1"}, "tasks": [{"env": {"B": "2"}, "count": 3}]}
    assert without_values(settings) == {
        "env": {"A": "(left out)"},
        "tasks": [{"env": {"B": "(left out)"}, "count": 3}],
    }
    told = {"env.A": "--set env.A=1", "tasks": "-n", "name": "a.yaml:1:1"}
    assert without_values({"origins": told}) == {
        "origins": {"env.A": "--set env.A", "tasks": "-n", "name": "a.yaml:1:1"}
    }


# --- the command ---------------------------------------------------------------------


def test_a_real_run_has_a_report(cluster: Cluster) -> None:
    running = cluster.bash("echo '<script>alert(1)</script>'; exit 33")
    assert running.end() == 33
    done = cluster.command("report")
    assert (done.returncode, done.stdout) == (0, f"{running.run}-report.html\n")
    page = (cluster.folder / f"{running.run}-report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in page
    assert cluster.command("report", "-o", "-").stdout.startswith("<!DOCTYPE html>")
    refused = cluster.command("report", "-o", "no/such/folder.html")
    assert refused.returncode == 8
    assert "cannot write no/such/folder.html: there is no folder" in refused.stderr
    unknown = cluster.command("report", "nothing")
    assert unknown.returncode == 2


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path) -> None:
    paths = records.plain(tmp_path / "state")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['matplotlib'] = None\n"
    )
    cluster = Cluster(tmp_path, {"PYTHONPATH": str(tmp_path)})
    done = cluster.command("report", paths.run)
    assert done.returncode == 2
    assert "pip install 'tfcluster[report]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert sys.executable in done.stderr


# --- a real browser ------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium or google-chrome")
    with started(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


_SIZES = """
[...document.querySelectorAll('h1, h2, h3, figure svg')].map(e => {
  const box = e.getBoundingClientRect();
  return [e.tagName, box.width, box.height];
})
"""
_PAPER = "getComputedStyle(document.body).backgroundColor"
_OVERFLOW = (
    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (380, True)])
def test_a_browser_shows_it_and_requests_nothing(
    pages: dict[str, Path], browser: Browser, kind: str, width: int, dark: bool
) -> None:
    browser.open(pages[kind], width=width, dark=dark)
    assert browser.requested == [pages[kind].as_uri()]
    assert browser.complaints() == []
    sizes = browser.evaluate(_SIZES)
    assert all(box[1] > 20 and box[2] > 10 for box in sizes), sizes
    pictures = [box for box in sizes if box[0] == "svg"]
    assert all(box[1] >= min(250, width - 60) and box[2] > 60 for box in pictures)
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    assert browser.evaluate(_OVERFLOW) <= 0
    colour = browser.evaluate(_PAPER)
    assert colour == ("rgb(20, 24, 30)" if dark else "rgb(255, 255, 255)")
