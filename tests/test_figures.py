"""Figures for notebooks and papers: what is drawn, how large, and what is said where there is nothing."""

from __future__ import annotations

import json
import re
from importlib import resources

import numpy as np
import pytest
from PIL import Image

from protofed.errors import ProtofedError
from protofed.report import figures
from protofed.report.figures import write_figures
from protofed.results.read import read_folder
from support.run_folders import accuracy, make_comparison, make_run


def test_accuracy_lines_are_the_means_over_seeds(tmp_path):
    figure = figures.plot_accuracy(make_comparison(tmp_path / "c"))
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines) == ["local", "fedsap", "fedavg"]
    np.testing.assert_allclose(lines["fedsap"].get_ydata()[-1], 100 * accuracy(2, 10, 0.05), rtol=1e-4)
    assert figure.axes[0].get_legend() is not None
    assert len(figure.axes[0].collections) == 3  # a band each
    assert figure.get_size_inches()[0] == 3.3
    assert figures.plot_accuracy(tmp_path / "c", by="prototype", width="page").get_size_inches()[0] == 6.9


def test_loss_of_one_run_has_no_legend(tmp_path):
    figure = figures.plot_loss(make_run(tmp_path / "r"))
    (line,) = figure.axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), [2.0 / r for r in range(1, 11)], rtol=1e-4)
    assert figure.axes[0].get_legend() is None


def test_clients_and_confusions(tmp_path):
    run = make_run(tmp_path / "r")
    shown = figures.plot_clients(run).axes[0].get_images()[0].get_array()
    expected = [[100 * (accuracy(1, r) + 0.01 * c) for r in range(2, 11, 2)] for c in range(4)]
    np.testing.assert_allclose(shown, expected)
    matrix = figures.plot_confusion(run).axes[0].get_images()[0].get_array()
    np.testing.assert_allclose(np.ma.filled(matrix, 0.0), [[80, 20], [0, 100]])
    by_prototype = figures.plot_confusion(run, by="prototype").axes[0].get_images()[0].get_array()
    np.testing.assert_allclose(np.ma.filled(by_prototype, 0.0), [[100, 0, 0], [0, 75, 25], [0, 0, 0]])


@pytest.mark.slow
def test_a_method_without_a_head_is_drawn_by_prototype(tmp_path):
    run = make_run(tmp_path / "r", headless=True)
    assert figures.plot_accuracy(run).axes[0].get_ylabel() == "accuracy (%)"
    assert figures.plot_clients(run).axes[0].get_images()[0].get_array().shape == (4, 5)
    assert figures.plot_confusion(run).axes[0].get_images()[0].get_array().shape == (3, 3)
    with pytest.raises(ProtofedError, match="no accuracy by head"):
        figures.plot_clients(run, by="head")
    names = [file.stem for file in write_figures(run, "svg")]
    assert names == ["accuracy", "accuracy-prototype", "loss", "clients", "confusion"]


def test_embedding_has_stars_and_three_panels_on_a_page(tmp_path):
    run = make_run(tmp_path / "r", snapshots=4)
    column = figures.plot_embedding(run)
    assert [axes.get_title(loc="left") for axes in column.axes] == ["round 8"]
    assert [text.get_text() for text in column.legends[0].get_texts()] == ["cat", "dog", "fox"]
    dots, stars = column.axes[0].collections
    assert len(dots.get_offsets()) == 60 and len(stars.get_offsets()) == 2
    page = figures.plot_embedding(run, width="page")
    assert [axes.get_title(loc="left") for axes in page.axes] == ["round 2", "round 6", "round 8"]
    assert page.axes[0].get_xlim() == page.axes[2].get_xlim()


@pytest.mark.parametrize("clients", [3, 40])
def test_gains_are_drawn_for_few_sites_and_for_many(tmp_path, clients):
    place = make_comparison(tmp_path / "c", seeds=2, clients=clients)
    figure = figures.plot_gains(place, by="head")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedsap", "fedavg"]
    if clients == 3:
        drawn = [dots.get_offsets()[:, 0] for dots in figure.axes[0].collections]
        assert sorted(t.get_text() for t in figure.axes[0].get_yticklabels()) == [f"client {c}" for c in range(3)]
    else:
        drawn = [line.get_ydata() for line in figure.axes[0].get_lines()[:2]]
    np.testing.assert_allclose(drawn, [[5.0] * clients, [-10.0] * clients], atol=1e-6)


def test_gains_and_bytes_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(ProtofedError, match="no gain over Local by head is known"):
        figures.plot_gains(make_run(tmp_path / "r"))
    with pytest.raises(ProtofedError, match="expected one of prototype"):
        figures.plot_bytes(make_run(tmp_path / "h", headless=True))
    (line,) = figures.plot_bytes(tmp_path / "r").axes[0].get_lines()
    np.testing.assert_allclose(line.get_xdata(), [256e-6 * r for r in (2, 4, 6, 8, 10)])


def test_clients_have_their_names(tmp_path):
    run = make_run(tmp_path / "r", clients=2)
    summary = json.loads((run / "summary.json").read_text())
    names = ["a long name of the northern clinic", "south"]
    (run / "summary.json").write_text(json.dumps({**summary, "client_names": names}))
    assert [t.get_text() for t in figures.plot_clients(run).axes[0].get_yticklabels()] == names


def test_figures_show_themselves_in_a_notebook(tmp_path):
    png = figures.plot_accuracy(make_run(tmp_path / "r"))._repr_png_()
    assert png.startswith(b"\x89PNG")


def test_a_result_that_was_never_written(tmp_path):
    rows = read_folder(make_run(tmp_path / "r")).runs[0].metrics
    held = figures.in_memory("fedsap", rows, None)
    (line,) = figures.plot_accuracy(held).axes[0].get_lines()
    assert len(line.get_xdata()) == 5
    assert len(figures.plot_loss(held).axes[0].get_lines()) == 1
    with pytest.raises(ProtofedError, match="no client has been evaluated"):
        figures.plot_clients(held)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_files_of_every_kind_and_twice_the_same(tmp_path, kind, begin):
    run = make_run(tmp_path / "r", snapshots=1)
    files = write_figures(run, kind)
    names = ["accuracy-head", "accuracy-prototype", "loss", "clients", "confusion", "embedding"]
    assert files == [run / "figures" / f"{name}.{kind}" for name in names]
    first = [file.read_bytes() for file in files]
    assert all(data.startswith(begin) for data in first)
    assert [file.read_bytes() for file in write_figures(run, kind, out=tmp_path / "again")] == first
    if kind == "png":
        assert Image.open(files[0]).size[0] == 990  # 3.3 inches at 300 dots


@pytest.mark.slow
def test_a_comparison_has_figures_of_each_first_seed(tmp_path):
    files = write_figures(make_comparison(tmp_path / "c", seeds=2), "svg", "page")
    names = [file.stem for file in files]
    assert names[:6] == ["gains-head", "gains-prototype", "accuracy-head", "accuracy-prototype", "loss", "bytes"]
    assert "clients-fedsap-seed1" in names and "clients-fedsap-seed2" not in names


def test_bad_input_is_named(tmp_path):
    run = make_run(tmp_path / "r")
    with pytest.raises(ProtofedError, match="--format 'jpg': expected one of png, svg, pdf"):
        write_figures(run, "jpg")
    with pytest.raises(ProtofedError, match="--width 'poster': expected one of column, page"):
        write_figures(run, width="poster")
    with pytest.raises(ProtofedError, match="no snapshots"):
        figures.plot_embedding(run)
    place = make_comparison(tmp_path / "c", seeds=1)
    with pytest.raises(ProtofedError, match="several runs; name one of local-seed1, fedsap-seed1"):
        figures.plot_clients(place)
    with pytest.raises(ProtofedError, match="no run 'x'"):
        figures.plot_confusion(place, "x")
    with pytest.raises(ProtofedError, match="nothing to draw yet"):
        write_figures(make_comparison(tmp_path / "none", finished=False))
    (run / "confusion.json").write_text("{")
    with pytest.raises(ProtofedError, match=r"confusion\.json: not readable"):
        figures.plot_confusion(run)


def test_page_and_figures_have_the_same_colours():
    css = resources.files("protofed.report").joinpath("static/page.css").read_text()
    for letter, colours in (("s", figures.SERIES), ("c", figures.CLASSES)):
        found = re.findall(rf"--{letter}(\d): light-dark\((#\w{{6}})", css)
        assert [colour for _, colour in found] == list(colours)
        assert [int(i) for i, _ in found] == list(range(len(colours)))
