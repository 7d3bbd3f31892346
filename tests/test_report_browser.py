"""The report in a real browser: Chromium, without a window. Skipped where there is none."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import protofed as pf
from protofed.report.live import LiveServer
from protofed.report.page import write_page
from protofed.results.lock import FolderLock
from support.run_folders import accuracy, make_comparison, make_run, make_snapshot

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no chromium with chromedriver here (apt-get install chromium chromium-driver)",
    ),
]
# Written anew with PROTOFED_NEW_LAYOUT=1 when the page is changed on purpose.
LAYOUT = Path(__file__).with_name("report_layout.json")
DESK, PHONE = (1200, 900), (390, 800)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    place = make_comparison(tmp_path_factory.mktemp("report") / "pets", measures=True, snapshots=4)
    return write_page(place).as_uri()


def show(browser, url, size=DESK, scheme="light"):
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(url)


def js(browser, code, *arguments):
    return browser.execute_script(f"return {code}", *arguments)


def until(true, seconds=15):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def column(browser, i):
    cells = f"[...document.querySelectorAll('#results-table tbody tr')].map(r => r.cells[{i}].textContent)"
    return js(browser, cells)


def choose(browser, id, value):
    js(browser, f"(byId('{id}').value = arguments[0], byId('{id}').onchange(), 1)", value)


def test_opens_without_a_word_on_the_console(browser, page):
    show(browser, page)
    assert browser.get_log("browser") == []
    assert js(browser, "document.querySelectorAll('section:not([hidden]) svg[role=img]').length") >= 10
    shown = js(browser, "[...document.querySelectorAll('nav a')].map(a => a.textContent)")
    sections = [
        "Verdict",
        "Results",
        "Curves",
        "Bytes",
        "Clients",
        "Classes",
        "Space",
        "Silhouette",
        "Terms",
        "Measures",
        "Settings",
    ]
    assert shown == sections
    assert js(browser, "performance.getEntriesByType('resource').length") == 0  # nothing was fetched
    assert js(browser, "document.querySelector('#curves-accuracy polyline').points.numberOfItems") == 5


def test_it_opens_with_a_verdict_and_one_picture(browser, page):
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    assert js(browser, "document.title") == "pets: 4 clients, 10 rounds, 3 seeds – protofed"
    assert js(browser, "byId('title').textContent + '|' + byId('kind').textContent") == (
        "pets: 4 clients, 10 rounds, 3 seeds|Comparison · pets"
    )
    first = "fedsap gains over Local: 97.00 % by head, +5.00 ± 0.00 points."
    assert js(browser, "byId('verdict-first').textContent") == first
    assert js(browser, "document.querySelector('main section:not([hidden])').id") == "verdict"
    assert js(browser, "document.querySelectorAll('#verdict-plot circle').length") == 8  # two methods at four sites
    picture = browser.find_element("css selector", "#verdict-plot svg")
    picture.send_keys(Keys.ARROW_DOWN)
    assert "fedsap: +5.00\nfedavg: −10.00" in js(browser, "byId('said').textContent")
    assert js(browser, "byId('clients-run').value") == "fedsap-seed1"  # not Local's
    assert js(browser, "document.querySelectorAll('#cost-spent polyline').length") == 3
    js(browser, "(document.querySelector('#cost-spent details').open = true, 1)")
    until(lambda: js(browser, "document.querySelectorAll('#cost-spent tbody tr').length") > 3)
    assert browser.get_log("browser") == []


def test_a_hundred_sites_and_long_names(browser, tmp_path):
    show(browser, write_page(make_comparison(tmp_path / "c", clients=100, seeds=2)).as_uri(), PHONE)
    assert js(browser, "document.querySelectorAll('#verdict-plot polyline').length") == 2
    assert js(browser, "document.documentElement.scrollWidth") == PHONE[0]
    name = "the large room on the second floor, second session"
    run = make_run(tmp_path / "r", clients=2)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "client_names": [name, "south"]}))
    show(browser, write_page(run).as_uri(), PHONE)
    spans = """[...document.querySelectorAll('#clients-plot text.name')]
      .map(t => [...t.children].map(s => s.textContent).join(' '))"""
    assert name in js(browser, spans)  # in full, in several lines
    assert browser.get_log("browser") == []


def test_a_table_that_is_cut_says_so(browser, page):
    show(browser, page, PHONE)
    box = "byId('results-table').parentElement"
    hint = f"{box}.previousElementSibling"
    until(lambda: not js(browser, f"{hint}.hidden"))
    assert "scroll sideways" in js(browser, f"{hint}.textContent") and js(browser, f"{box}.dataset.more") == "true"
    js(browser, f"({box}.scrollLeft = 9999, 1)")
    until(lambda: js(browser, f"{box}.dataset.more") == "false")
    show(browser, page, (1600, 900))
    until(lambda: js(browser, f"{hint}.hidden"))
    tall = "[...document.querySelectorAll('.controls label')].filter(l => l.offsetHeight > 40).length"
    show(browser, page, PHONE)
    assert js(browser, tall) == 0  # no label is broken into lines


def test_table_sorts_by_every_column(browser, page):
    show(browser, page)
    assert column(browser, 0) == ["local", "fedsap", "fedavg"]
    press = "(document.querySelectorAll('#results-table thead button')[{}].click(), 1)"
    js(browser, press.format(1))
    assert column(browser, 0) == ["fedsap", "local", "fedavg"]
    assert js(browser, "document.querySelectorAll('#results-table th')[1].ariaSort") == "descending"
    js(browser, press.format(1))
    assert column(browser, 0) == ["fedavg", "local", "fedsap"]
    js(browser, press.format(0))
    assert column(browser, 0) == ["fedavg", "fedsap", "local"]
    best = [100 * accuracy(seed, 10, 0.05) for seed in (1, 2, 3)]
    assert js(browser, "document.querySelector('#results-table td.best').textContent") == f"{best[1]:.2f} ± 1.00"


def test_slider_moves_through_the_rounds(browser, page):
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    assert js(browser, "byId('space-out').textContent") == "round 8"
    drawn = "document.querySelector('#space-plot .dots').getAttribute('d')"
    last = js(browser, drawn)
    slider = browser.find_element("id", "space-round")
    slider.send_keys(Keys.HOME)
    assert js(browser, "byId('space-out').textContent") == "round 2"
    assert js(browser, drawn) != last
    assert js(browser, "byId('space-round').getAttribute('aria-valuetext')") == "round 2"
    slider.send_keys(Keys.ARROW_RIGHT)
    assert js(browser, "byId('space-out').textContent") == "round 4"
    assert js(browser, "document.querySelectorAll('#space-plot .star').length") == 2
    js(browser, "(byId('space-play').click(), 1)")
    until(lambda: js(browser, "byId('space-out').textContent + byId('space-play').textContent") == "round 8Play")


def test_choices_change_what_is_drawn(browser, page):
    show(browser, page)
    before = js(browser, "document.querySelector('#clients-plot svg').innerHTML")
    choose(browser, "clients-run", "fedavg-seed2")
    assert js(browser, "document.querySelector('#clients-plot svg').innerHTML") != before
    assert "10" in js(browser, "byId('classes-about').textContent")
    choose(browser, "classes-show", "head")
    assert "80" in js(browser, "[...document.querySelectorAll('#classes-plot text')].map(t => t.textContent)")
    choose(browser, "space-colour", "client")
    assert js(browser, "byId('space-legend').textContent") == "client 0client 1"
    js(browser, "(document.querySelectorAll('#curves [data-legend] button')[0].click(), 1)")
    assert js(browser, "document.querySelectorAll('#curves-accuracy polyline').length") == 2
    assert js(browser, "document.querySelectorAll('[data-legend] button[aria-pressed=false]').length") == 5
    js(browser, "(byId('curves-log').click(), 1)")
    assert js(browser, "document.querySelectorAll('#curves-loss polyline').length") == 2
    assert browser.get_log("browser") == []


def test_theme_follows_the_system_until_it_is_chosen(browser, page):
    ground = "getComputedStyle(document.body).backgroundColor"
    show(browser, page, scheme="dark")
    assert js(browser, ground) == "rgb(17, 22, 28)"
    show(browser, page)
    assert js(browser, ground) == "rgb(245, 247, 249)" and js(browser, "byId('theme').textContent") == "Theme: system"
    seen = []
    for _ in range(3):
        js(browser, "(byId('theme').click(), 1)")
        seen.append((js(browser, "byId('theme').textContent"), js(browser, ground)))
    assert seen == [
        ("Theme: light", "rgb(245, 247, 249)"),
        ("Theme: dark", "rgb(17, 22, 28)"),
        ("Theme: system", "rgb(245, 247, 249)"),
    ]


def test_text_can_be_read_in_both_themes(browser, page):
    """Contrast of text against its ground: at least 4.5, as WCAG AA asks."""
    code = """(() => {
      const probe = document.createElement('i'); document.body.append(probe);
      const colour = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
      const rgb = (name) => colour(name).match(/\\d+/g).map(Number);
      const found = ['--ink', '--quiet', '--accent', '--card', '--page'].map(rgb); probe.remove(); return found; })()"""

    def light(rgb):
        parts = [c / 255 for c in rgb]
        return np.dot(
            [0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        )

    for scheme in ("light", "dark"):
        show(browser, page, scheme=scheme)
        *texts, card, ground = map(light, js(browser, code))
        for text in texts:
            for under in (card, ground):
                assert (max(text, under) + 0.05) / (min(text, under) + 0.05) >= 4.5


def test_phone_does_not_scroll_sideways(browser, page):
    show(browser, page, PHONE)
    assert js(browser, "document.documentElement.scrollWidth") == PHONE[0]
    wide = """[...document.querySelectorAll('section:not([hidden])')]
      .filter(s => s.getBoundingClientRect().right > innerWidth).length"""
    assert js(browser, wide) == 0
    js(browser, "(document.querySelectorAll('details').forEach(d => { d.open = true; }), 1)")
    assert js(browser, "document.documentElement.scrollWidth") == PHONE[0]


def test_keys_and_names_for_those_who_do_not_see(browser, page):
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    unnamed = """[...document.querySelectorAll('section:not([hidden]) :is(select, input, button, svg[role=img])')]
      .filter(e => !e.getAttribute('aria-label') && !(e.tagName === 'BUTTON' && e.textContent.trim()))
      .filter(e => !(e.labels && e.labels.length)).length"""
    assert js(browser, unnamed) == 0
    assert js(browser, "[...document.querySelectorAll('th')].filter(t => !t.scope).length") == 0
    chart = browser.find_element("css selector", "#curves-accuracy svg")
    chart.send_keys(Keys.ARROW_LEFT)
    assert js(browser, "byId('said').textContent").startswith("round 8\nfedsap: ")
    assert not js(browser, "byId('tip').hidden")
    chart.send_keys(Keys.ESCAPE)
    assert js(browser, "byId('tip').hidden")
    heat = browser.find_element("css selector", "#classes-confusion svg")
    heat.send_keys(Keys.ARROW_RIGHT)
    assert js(browser, "byId('said').textContent") == "cat taken for dog\n4 of 20"
    js(browser, "(document.querySelector('#curves-accuracy details').open = true, 1)")
    until(lambda: js(browser, "document.querySelectorAll('#curves-accuracy tbody tr').length") == 5)
    first = "[...document.querySelector('#curves-accuracy tbody tr').cells].map(c => c.textContent)"
    assert js(browser, first) == ["2", "60 %", "65 %", "50 %"]


def test_names_with_markup_are_shown_as_they_are(browser, tmp_path):
    evil = "<b onclick=alert(1)>x</b>"
    show(browser, write_page(make_run(tmp_path / "r", method=evil, snapshots=1)).as_uri())
    assert js(browser, "document.querySelectorAll('b').length") == 0
    assert evil in js(browser, "byId('schedule-about').textContent")
    assert browser.get_log("browser") == []


def test_a_method_without_a_head(browser, tmp_path):
    show(browser, write_page(make_run(tmp_path / "r", headless=True, snapshots=1)).as_uri())
    assert browser.get_log("browser") == []
    assert (
        js(browser, "byId('clients-kind').value + byId('classes-kind').value + byId('cost-kind').value")
        == "prototypeprototypeprototype"
    )
    assert js(browser, "document.querySelector('#clients-plot svg path') !== null")


@pytest.mark.parametrize("broken", ["rounds.jsonl", "metrics.jsonl", "clients.jsonl", "confusion.json", "summary.json"])
def test_a_broken_file_leaves_a_note_and_a_page(browser, tmp_path, broken):
    run = make_run(tmp_path / "r", snapshots=2, measures=True)
    (run / broken).write_text("{]\n")
    show(browser, write_page(run).as_uri())
    assert broken in js(browser, "byId('notes-body').textContent")
    assert browser.get_log("browser") == []
    assert js(browser, "document.querySelectorAll('section:not([hidden])').length") >= 6


def test_a_run_that_has_hardly_begun(browser, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "settings.toml").write_text('rounds = 5\n[method]\nname = "fedsap"\n')
    with FolderLock(tmp_path / "r"):
        show(browser, write_page(tmp_path / "r").as_uri())
    assert browser.get_log("browser") == []
    assert js(browser, "byId('status').textContent") == "under way: round 0 of 5"
    assert js(browser, "[...document.querySelectorAll('nav a')].map(a => a.textContent)") == ["Under way", "Settings"]
    show(browser, write_page(tmp_path / "r").as_uri())
    assert js(browser, "byId('status').textContent") == "interrupted after round 0 of 5"


def test_live_view_updates_itself_and_stays_where_it_is(browser, tmp_path):
    run = make_run(tmp_path / "r", rounds=6, planned=8, finished=False, snapshots=2)
    with FolderLock(run), LiveServer(run, 0, "127.0.0.1") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            show(browser, server.url)
            assert js(browser, "byId('status').textContent") == "under way: round 6 of 8"
            js(
                browser,
                "(window.kept = 1, byId('space-round').value = '0', byId('space-round').oninput(), scrollTo(0, 700), 1)",
            )
            before = js(browser, "scrollY")
            with (run / "rounds.jsonl").open("a") as file:
                file.write(json.dumps({"round": 7, "loss": 0.1, "terms": {"ce": 0.1}, "up": {}, "down": {}}) + "\n")
            make_snapshot(run / "snapshots" / "round-000007.npz", grown=4)
            until(lambda: js(browser, "byId('status').textContent") == "under way: round 7 of 8")
            assert js(browser, "[window.kept, scrollY, byId('space-round').value, byId('space-round').max]") == [
                1,
                before,
                "0",
                "2",
            ]
            assert js(browser, "byId('space-out').textContent") == "round 2"
        finally:
            server.shutdown()
            thread.join()
    until(lambda: "stopped" in js(browser, "byId('status').textContent"))


def test_an_audit_is_read_on_a_desk_and_on_a_phone(browser, tmp_path):
    settings = {"data": "digits", "clients": 3, "way": 2, "shot": 3, "rounds": 1, "engine": "loop"}
    pf.run("fedproto", out=tmp_path / "r", filters=["quantise?bits=8"], **settings)
    page = pf.audit(tmp_path / "r", clients=1).folder / "index.html"
    for size in (DESK, PHONE):
        show(browser, page.as_uri(), size)
        assert browser.get_log("browser") == []
        assert js(browser, "document.documentElement.scrollWidth") == size[0]  # nothing sticks out
        assert (
            js(browser, "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0
        )
        widths = js(browser, "[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])")
        assert len(widths) >= 5 and all(natural == 8 and shown >= 64 for natural, shown in widths)
    headings = js(browser, "[...document.querySelectorAll('h3')].map(h => h.textContent)")
    assert headings == ["What the message says", "Whose samples were used", "What the samples look like"]


def _layout(browser, page, size, scheme):
    show(browser, page, size, scheme)
    blocks = """Object.fromEntries([...document.querySelectorAll(
      'header .bar, nav, section:not([hidden]), .plot, #results-table, .controls')]
      .map((e, i) => [e, i, e.getBoundingClientRect()]).filter(([, , b]) => b.width > 0)
      .map(([e, i, b]) => [e.id || `${e.className || e.tagName}-${i}`, [b.left, b.width, b.height].map(Math.round)]))"""
    found = js(browser, blocks)
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("L")
    return {"blocks": found, "grey": np.asarray(picture.resize((24, 18), Image.Resampling.BOX)).astype(int).tolist()}


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_layout_is_as_it_was(browser, page, size, scheme):
    """Places and sizes of the blocks and the coarse shades of the first screen: fonts may differ, the layout may not."""
    found = _layout(browser, page, size, scheme)
    name = f"{size[0]}-{scheme}"
    if os.environ.get("PROTOFED_NEW_LAYOUT"):
        known = json.loads(LAYOUT.read_text()) if LAYOUT.exists() else {}
        LAYOUT.write_text(json.dumps({**known, name: found}) + "\n")
    known = json.loads(LAYOUT.read_text())[name]
    assert found["blocks"].keys() == known["blocks"].keys()
    for block, (left, width, height) in found["blocks"].items():
        was_left, was_width, was_height = known["blocks"][block]
        assert abs(left - was_left) <= 3, block
        if block != "results-table":  # as wide as its text on a phone
            assert abs(width - was_width) <= 3, block
        assert abs(height - was_height) <= 12 + 0.15 * was_height, block
    difference = np.abs(np.array(found["grey"]) - np.array(known["grey"]))
    assert difference.mean() < 8
    assert (difference > 60).mean() < 0.05
