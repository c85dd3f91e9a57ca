from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.metrics import METRICS
from rl.records.charts import _SMOOTHED, PANELS, _moving_average, draw_panel
from rl.records.history import History, encode_line
from rl.records.provenance import record_engines, record_launch
from rl.records.report import write_report
from rl.run_folder import RunFolder, RunFolderError

HOSTILE = '"><script>alert(1)</script><img src=http://example.org/x onerror=alert(2)>'
CONFIG = "run: {iterations: 5}\n"


class Page(HTMLParser):
    """Elements, their attributes and the text of a page; fails on tags that are not closed in order."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _folder(tmp_path: Path, history: History, config: str = CONFIG, name: str = "tiny") -> RunFolder:
    folder = RunFolder.create(tmp_path, name, config)
    folder.metrics.write_text("".join(encode_line(step, metrics) for step, metrics in history.items()))
    return folder


def _page(folder: RunFolder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def _iteration(step: int) -> dict[str, float | int]:
    """Every metric of the table, no two alike."""
    return {name: (index + 1) / 1024 + step / 64 for index, name in enumerate(METRICS)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Page]:
    history: History = {0: {"held_out/reward": 0.125, "held_out/accuracy": 0.25}}
    history |= {step: _iteration(step) for step in range(1, 6)}
    history[5] |= {"held_out/reward": 0.875, "held_out/accuracy": 0.9375}
    folder = _folder(tmp_path_factory.mktemp("out"), history)
    record_launch(folder)
    record_launch(folder, resumed_at=2)
    precision_map = PrecisionMap.resolve(4, named_spec("minite"), first_layers_bf16=1)
    engines = ("learner", "sampler", "weight_sync")
    record_engines(folder, [EngineReport(name, precision_map, "reference", 4, 7007) for name in engines])
    return folder, _page(folder)


def test_the_result_is_the_held_out_reward_from_first_to_last(report: tuple[RunFolder, Page]) -> None:
    text = report[1].text
    assert "Held-out reward 0.125 → 0.875 (iteration 0 → 5)" in text
    assert "Held-out accuracy 25 % → 93.75 % (iteration 0 → 5)" in text
    assert "5 of 5 iterations, started" in text and "resumed once" in text


def test_every_metric_is_listed_with_meaning_and_values(report: tuple[RunFolder, Page]) -> None:
    html = report[0].report.read_text(encoding="utf-8")
    rows = re.findall(r"<tr><th scope=\"row\"><code>(.*?)</code></th>(.*?)</tr>", html, re.DOTALL)
    assert [name for name, _ in rows] == list(METRICS)
    values = dict(rows)
    assert METRICS["gap/p999"].meaning in values["gap/p999"]
    index = list(METRICS).index("policy/entropy")
    first, last = ((index + 1) / 1024 + step / 64 for step in (1, 5))
    assert f"{first:.4g}</td>" in values["policy/entropy"] and f"{last:.4g}</td>" in values["policy/entropy"]


def test_there_is_a_chart_of_each_panel_with_words_for_it(report: tuple[RunFolder, Page]) -> None:
    images = report[1].all("img")
    assert len(images) == len(PANELS)
    for image, panel in zip(images, PANELS, strict=True):
        source, words = image["src"] or "", image["alt"] or ""
        assert source.startswith("data:image/svg+xml;base64,")
        root = ElementTree.fromstring(base64.b64decode(source.partition(",")[2]))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert words.startswith(panel.title) and all(name in words for name in panel.names)
        assert all(METRICS[name].meaning in report[1].text for name in panel.names)


def test_the_page_needs_nothing_else(report: tuple[RunFolder, Page]) -> None:
    page = report[1]
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object", "a"})
    for _, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on")}
        assert all((attributes.get(name) or "data:").startswith("data:") for name in ("src", "href"))
    style = page.text[page.text.index(":root") : page.text.index("@media")]
    assert "url(" not in style and "@import" not in style


def test_specifications_configuration_and_provenance_are_shown(report: tuple[RunFolder, Page]) -> None:
    folder, page = report
    described = json.loads(folder.run_json.read_text())
    precision_map = PrecisionMap.resolve(4, named_spec("minite"), first_layers_bf16=1)
    assert page.text.count(precision_map.fingerprint) == 3
    assert page.text.count("7007") == 3
    assert "One fingerprint in learner, sampler, weight_sync" in page.text
    assert named_spec("minite").canonical() in page.text and named_spec("bf16").canonical() in page.text
    assert CONFIG.strip() in page.text
    for launch in described["launches"]:
        assert launch["command"] in page.text and launch["machine"]["cpu"] in page.text
        assert f"torch {launch['versions']['torch']}" in page.text


def test_a_difference_between_the_engines_is_said(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {})
    maps = [PrecisionMap.resolve(2, named_spec(name)) for name in ("minite", "minite_expert")]
    names = ("learner", "sampler")
    record_engines(folder, [EngineReport(n, m, "reference", 2, 1) for n, m in zip(names, maps, strict=True)])
    text = _page(folder).text
    assert "The fingerprints of learner, sampler differ" in text
    assert "weight.outer_domain=row" in text and "weight.outer_domain=expert" in text


def test_values_cannot_inject_markup(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path, {1: {"policy/loss": 1.0}}, f"project: '{HOSTILE}'\n", name=HOSTILE.replace("/", "|")
    )
    described = {
        "launches": [
            {
                "started": HOSTILE,
                "resumed_at": HOSTILE,
                "command": HOSTILE,
                "git": {"commit": HOSTILE, "modified": True},
                "versions": {HOSTILE: HOSTILE},
                "machine": {
                    "cpu": HOSTILE,
                    "cores": 2,
                    "memory_gib": 1,
                    "gpus": [HOSTILE],
                    "system": HOSTILE,
                },
            }
        ],
        "engines": [
            dict.fromkeys(("engine", "fingerprint", "backend", "expert_layers", "expert_calls"), HOSTILE)
        ],
        "specs": [
            {"engines": [HOSTILE]} | dict.fromkeys(("layers", "name", "fingerprint", "canonical"), HOSTILE)
        ],
    }
    folder.run_json.write_text(json.dumps(described))
    page = _page(folder)
    assert not page.all("script")
    assert all((image["src"] or "").startswith("data:") for image in page.all("img"))
    assert page.text.count("alert(1)") >= 15  # shown as text wherever it was put


@pytest.mark.parametrize(
    ("history", "said"),
    [
        ({}, ["No rewards yet", "No metrics have been recorded", "0 of 5 iterations"]),
        ({0: {"held_out/reward": 0.5}}, ["Held-out reward 0.5 at iteration 0"]),
        ({1: _iteration(1)}, ["1 of 5 iterations"]),
        ({1: {"gap/p99": 0.0}, 2: {"gap/p99": 0.0}}, ["No rewards yet", "gap/p99"]),
        ({1: {"metric/of_another_version": 1.0, "policy/loss": 1.0}}, ["policy/loss"]),
    ],
)
def test_what_is_missing_is_left_out(tmp_path: Path, history: History, said: list[str]) -> None:
    page = _page(_folder(tmp_path, history))
    assert all(text in page.text for text in said)
    assert "metric/of_another_version" not in page.text


@pytest.mark.parametrize("values", [(-2.5e-7, 1.00001), (98765.4321, 98765.4322)])
def test_nothing_stands_outside_a_chart_or_on_another_part_of_it(
    values: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what matplotlib says of its parts once the chart is drawn."""
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    history: History = {step: dict.fromkeys(METRICS, values[step % 2]) for step in (9_990, 9_995, 10_000)}
    for panel in PANELS:
        draw_panel(panel, history)
    for figure in drawn:
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        whole, [axes], [legend] = figure.bbox, figure.axes, figure.legends
        around = axes.get_tightbbox(renderer)
        assert around is not None
        assert min(around.x0, around.y0) >= 0 and around.x1 <= whole.x1
        names = [text.get_window_extent(renderer) for text in legend.get_texts()]
        assert all(around.y1 < name.y0 and name.y1 <= whole.y1 and name.x1 <= whole.x1 for name in names)
        assert axes.bbox.width > 0.7 * whole.width and axes.bbox.height > 0.5 * whole.height
    assert len(drawn) == len(PANELS)


def test_a_long_run_is_reported(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    history = {step: {"reward/mean": rng.random(), "gap/p99": rng.random() / 100} for step in range(1, 1001)}
    folder = _folder(tmp_path, history)
    assert len(_page(folder).all("img")) == 2
    assert folder.report.stat().st_size < 500_000


@pytest.mark.parametrize(
    ("file", "text"), [("config.yaml", "a: [1"), ("metrics.jsonl", "x\ny\n"), ("run.json", "{")]
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str) -> None:
    folder = _folder(tmp_path, {})
    (folder.path / file).write_text(text)
    with pytest.raises(RunFolderError, match="cannot be reported"):
        write_report(folder)


def test_the_report_can_be_made_again_from_the_command_line(report: tuple[RunFolder, Page]) -> None:
    folder = report[0]
    before = folder.report.read_bytes()
    folder.report.unlink()
    command = [sys.executable, "-m", "rl.records.report"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([*command, folder.path], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{folder.report}\n"), done.stderr
    assert folder.report.read_bytes() == before
    refused = subprocess.run([*command, folder.path.parent], cwd=root, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1


VALUES = st.one_of(st.just(0.0), st.floats(-1e12, 1e12), st.floats(1e-12, 1e-3))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(PANELS),
    st.lists(st.integers(0, 200), min_size=1, max_size=8, unique=True).map(sorted),
    st.data(),
)
def test_any_values_can_be_drawn(panel, steps: list[int], data: st.DataObject) -> None:
    names = st.dictionaries(st.sampled_from(panel.names), VALUES)
    history = {step: data.draw(names) for step in steps}
    chart = draw_panel(panel, history)
    present = {name for metrics in history.values() for name in metrics}
    if not present:
        assert chart is None
    else:
        assert chart and {name for name, _ in chart.series} == present
        ElementTree.fromstring(chart.svg)


@pytest.mark.parametrize("count", [1, 5, _SMOOTHED, 900])
def test_the_moving_average_is_the_mean_of_neighbours(count: int) -> None:
    values = np.random.default_rng(0).standard_normal(count)
    reach = max(4, count // 100)
    expected = [values[max(0, i - reach) : i + reach + 1].mean() for i in range(count)]
    np.testing.assert_allclose(_moving_average(values), expected, atol=1e-12)
