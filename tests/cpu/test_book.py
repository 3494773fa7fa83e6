"""The published book builds with warnings as errors, and is what it has to be: complete, offline, checked, light."""

import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docutils import nodes

import reflib
from reflib import lab
from reflib.errors import LabError
from reflib.lab import book, book_checks, runner
from reflib.lab import notebook as nb

ROOT = runner.ROOT
CHAPTERS = [p for p in runner.notebooks() if p.stem != "start-here"]
FOLDERS = "capture ir lower fuse autotune schedule plan generate wrap package observe .".split()
NO_COUNTERPART = {"cli.py"}  # commands for the library's own user


def extension(name: str) -> ModuleType:
    """A module of the book's Sphinx extension."""
    folder = str(ROOT / "book" / "_ext")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


data = extension("reflib_pages")
notices = extension("reflib_notices")
figure = extension("reflib_figure")
claims = extension("reflib_claims")
standing = extension("reflib_standing")
api = extension("reflib_api")


@pytest.fixture
def pages(site: Path) -> Path:
    return site


def text_of(pages: Path, page: str) -> str:
    return (pages / f"{page}.html").read_text(encoding="utf-8")


def article(pages: Path, page: str) -> str:
    """What is in the page itself, without the sidebars."""
    return text_of(pages, page).split("<article", 1)[1].split("</article>", 1)[0]


def every_page(pages: Path) -> Iterator[str]:
    """The pages that a reader turns to; not the search and the ones that send on."""
    for folder in ("book", "notebooks"):
        yield from (f"{folder}/{p.stem}" for p in sorted((pages / folder).glob("*.html")))


def test_it_builds_in_time(built: tuple[Path, float]) -> None:
    pages, seconds = built
    assert (pages / "index.html").exists()
    began = time.process_time()
    assert sum(i * i for i in range(10**7))
    slow = max(1, (time.process_time() - began) / 0.6)  # (0.88 s where the book took 69 to 74)
    assert seconds < 60 * slow  # of processor, so that a busy machine does not matter, nor a slower one


def test_every_check_passes(pages: Path) -> None:
    assert book_checks.problems(pages) == []


def test_scripts_are_loaded_only_where_they_are_used(pages: Path) -> None:
    with_formulas = [p for p in every_page(pages) if "tex-svg.js" in text_of(pages, p)]
    assert "notebooks/measuring" in with_formulas
    assert all(re.search('class="[^"]*math[ "]', text_of(pages, p)) for p in with_formulas)
    with_figures = [p for p in every_page(pages) if "vega-embed.min.js" in text_of(pages, p)]
    assert "notebooks/decompose-k" in with_figures
    assert all('class="reflib-vega"' in text_of(pages, p) for p in with_figures)
    assert not any("sphinx-thebe" in text_of(pages, p) for p in every_page(pages))


def test_every_page_says_edition_and_commit_and_where_to_report(pages: Path) -> None:
    for page in every_page(pages):
        text = text_of(pages, page)
        assert re.search(rf"Edition {re.escape(reflib.__version__)}, commit <code>[0-9a-f]{{12}}\+?</code>", text), page
        assert "Report an error</a>" in text, page
        assert "prev-next-area" in text and "search-button" in text and "theme-switch" in text, page


def test_chapters_open_in_colab_from_where_they_are(pages: Path) -> None:
    for path in [*CHAPTERS, ROOT / "notebooks" / "start-here.ipynb"]:
        at = f"somebody/reflib/blob/main/{path.relative_to(ROOT)}"
        text = article(pages, f"notebooks/{path.stem}")
        assert re.findall(r'<a href="(https://[^"]*)">(Open in Colab|Source)</a>', text) == [
            (f"https://colab.research.google.com/github/{at}", "Open in Colab"),
            (f"https://github.com/{at}", "Source"),
        ]
    assert "Open in Colab" not in text_of(pages, "book/glossary")


def test_where_a_checkout_came_from(tmp_path: Path) -> None:
    assert book.repository(tmp_path) == ""  # no checkout at all
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert book.repository(tmp_path) == ""
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", "git@github.com:o/n.git"], check=True)
    assert book.repository(tmp_path) == "https://github.com/o/n"
    for named in ("https://github.com/a/b.c", "https://github.com/a/b.c.git", "https://github.com/a/b.c/"):
        assert book.repository(tmp_path, named) == "https://github.com/a/b.c"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "set-url", "origin", "/srv/mirror"], check=True)
    assert book.repository(tmp_path) == ""  # no reader can go there
    with pytest.raises(LabError, match="OWNER/NAME"):
        book.repository(tmp_path, "https://example.org/n")


def test_parts_have_overviews_and_chapters_are_numbered_on_and_on(pages: Path) -> None:
    for number, path in enumerate(CHAPTERS, 1):
        title = re.search(r"<h1>(.*?)<a", article(pages, f"notebooks/{path.stem}"), re.S)
        assert title and f'class="section-number">{number}. ' in title.group(1), path.stem
    assert 'class="section-number"' not in article(pages, "notebooks/start-here")
    parts = data.parts(ROOT)
    assert [slug for _, _, slugs in parts for slug in slugs] == [p.stem for p in CHAPTERS]
    for _, overview, slugs in parts:
        assert all(f"../notebooks/{slug}.html" in article(pages, overview) for slug in slugs)


def test_the_readme_counts_the_chapters() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"The book has {len(CHAPTERS)} chapters" in text and len(data.parts(ROOT)) == 6


# ---- the first page


def test_the_figure_is_drawn_from_what_the_example_made(pages: Path) -> None:
    made = figure.read(ROOT)
    text = article(pages, "book/index")
    assert unescape(text).count(figure.words(made)) == 1
    for name in (op for op, _ in made["ops"]):
        assert f">{name}</text>" in text
    assert text.count(">A</text>") == sum(kernel == 0 for _, kernel in made["ops"]) + 1


def test_the_example_has_ten_lines_and_its_output_is_shown(pages: Path) -> None:
    assert len((ROOT / "book" / "landing.py").read_text().splitlines()) == 10
    shown = unescape(re.sub(r"<[^>]+>", "", article(pages, "book/index")))
    assert figure.read(ROOT)["output"].strip() in shown


@pytest.mark.slow
def test_the_example_still_prints_that() -> None:
    """Executed as a reader would; the sizes of machine code depend on Triton's version, what is printed does not."""
    pytest.importorskip("triton")
    from reflib.lab import landing

    now, shown = landing.execute(), figure.read(ROOT)
    for what in ("output", "ops", "moved"):
        assert now[what] == shown[what], f"{what}: run python -m reflib.lab.landing"
    assert [a["name"] for a in now["variants"]] == [a["name"] for a in shown["variants"]]


def test_routes_add_up(pages: Path) -> None:
    told = data.chapters(ROOT)
    text = unescape(re.sub(r"<[^>]+>", "", article(pages, "book/index")))
    whole = sum(c.minutes for c in told.values())
    assert f"about {data.duration(whole)} of reading" in text
    assert f"({told['start-here'].minutes + told['one-function-all-stages'].minutes} minutes of reading" in text
    assert [data.duration(m) for m in (45, 60, 80, 435)] == ["45 minutes", "1 hour", "1½ hours", "7 hours"]


# ---- tables


def test_every_recorded_number_is_in_a_table(pages: Path) -> None:
    text = article(pages, "book/results")
    assert "mode inference, model" not in text  # of sweeps: they have a page of their own
    for slug, path in data.recordings(ROOT):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        assert f"{len(recorded['rows']):,} numbers." in text, slug
        assert data.executed_on(recorded).split(", at ")[0] in text and recorded["shared"]["device"] in text
        for _, group in data.grouped(recorded["rows"]):
            heads, body = data.told_by(group)
            metrics = {", ".join(filter(None, (r["metric"], r.get("unit", "")))) for r in group}
            columns = [i for i, head in enumerate(heads) if head in metrics]
            values = sum(bool(line[i]) for line in body for i in columns)
            assert values >= sum(r["value"] is not None for r in group)


def test_two_values_of_one_case_have_two_lines() -> None:
    row = {"case": "a", "metric": "time", "unit": "µs", "value": 1.0, "at": {"n": 4}}
    heads, body = data.told_by([row, {**row, "value": 2.0, "note": "again"}])
    assert heads == ["case", "n", "time, µs", "note"]
    assert body == [["a", "4", "1.00", ""], ["a", "4", "2.00", "again"]]


def test_the_status_page_has_time_and_device_of_every_notebook(pages: Path) -> None:
    text = article(pages, "book/status")
    for told in data.chapters(ROOT).values():
        row = next(r for r in re.findall(r"<tr.*?</tr>", text, re.S) if f"/{told.slug}.html" in r)
        assert data.executed_on(told.stamp) in row or f"Executed on {data.executed_on(told.stamp)}" in text
        assert told.stamp["commit"] in row
        assert "match its code" in row, told.slug
        assert told.newer or re.search(r">\s*(<p>)?\d+\ss<", row), told.slug  # (how long all cells take is not known)


def test_cells_that_are_newer_than_the_recording_say_so(pages: Path) -> None:
    for told in data.chapters(ROOT).values():
        assert text_of(pages, f"notebooks/{told.slug}").count("Not recorded yet") == told.newer, told.slug


def test_a_book_of_a_run_names_its_own_machine(tmp_path: Path) -> None:
    notebooks = tmp_path / "notebooks"
    (notebooks / "recorded").mkdir(parents=True)
    (notebooks / "recorded" / "seconds.tsv").write_text("fusion\th200\t64\nmeasuring\th200\t63\n")
    book.put_executed(ROOT / "notebooks" / "fusion.ipynb", notebooks, "AMD EPYC")
    told = data.chapter(notebooks / "fusion.ipynb")
    assert told.stamp["device"] == "AMD EPYC" and told.matches
    assert data.seconds(tmp_path, "fusion", "AMD EPYC") == "not noted"
    assert data.seconds(tmp_path, "measuring", "NVIDIA H200") == "63\u00a0s"


# ---- the map


def test_the_map_has_every_file_of_the_compiler() -> None:
    mapped = [c.file for c in data.counterparts(ROOT)]
    assert len(mapped) == len(set(mapped))
    library = ROOT / "reflib"
    there = {p.relative_to(library).as_posix() for folder in FOLDERS for p in (library / folder).glob("*.py")}
    there = {f for f in there if not f.endswith("__init__.py")} - NO_COUNTERPART
    assert there - set(mapped) == set(), "put them into book/inductor_map.tsv"
    assert [f for f in mapped if not (library / f).is_file()] == []
    assert [f for f in mapped if not data.first_sentence(library / f)] == []


def test_what_the_map_names_of_pytorch_is_there() -> None:
    import torch

    if not torch.__version__.startswith(data.TORCH.removeprefix("v")):
        pytest.skip(f"the map is of PyTorch {data.TORCH}")
    spec = find_spec("torch")
    assert spec and spec.origin
    site = Path(spec.origin).parents[1]
    named = {f for c in data.counterparts(ROOT) for f in c.theirs}
    assert [f for f in sorted(named) if not any((p / f).is_file() for p in (site, site / "torch" / "include"))] == []


def test_the_map_cites_what_the_project_has_read() -> None:
    """A pull request in the map is one that a chapter or a docstring explains."""
    said = "\n".join(p.read_text(encoding="utf-8") for p in [*runner.notebooks(), *(ROOT / "reflib").rglob("*.py")])
    papers = {"doi:10.1145/1498765.1498785"}  # the roofline's, cited in autotune/roofline.py by its authors
    sources = {s for c in data.counterparts(ROOT) for s in c.sources} - papers
    unread = [s for s in sources if s.split(":")[-1].split("#")[-1] not in said]
    assert unread == []
    assert data.address("torchdynamo#949") == "https://github.com/pytorch/torchdynamo/pull/949"
    assert data.address("#164212").endswith("/pytorch/pytorch/pull/164212")


# ---- API, glossary, notices


def test_the_api_pages_have_every_public_name(pages: Path) -> None:
    text = "".join(article(pages, p) for p in every_page(pages) if p.startswith("book/api"))
    for name in [*(f"reflib.{n}" for n in reflib.__all__), *(f"reflib.lab.{n}" for n in lab._HOME)]:
        assert f'id="{name}"' in text, name


def test_docstrings_become_definition_lists() -> None:
    said = "Do it.\n\na, b: two things,\n    going on with `x`.   c: a third.\nRaises X_ for *args.\n\n>>> f(1)"
    lines = api.to_rst(said.split("\n"))
    assert lines == [
        "Do it.", "", "``a``, ``b``", "    two things,", "    going on with ``x``.", "", "``c``", "    a third.", "",
        "Raises X\\_ for \\*args.", "", ">>> f(1)", "",
    ]  # fmt: skip


def test_chapters_link_terms_to_the_glossary_once(pages: Path) -> None:
    link = re.compile(r'class="reflib-term[^"]*" href="\.\./book/glossary\.html#([^"]+)"')
    for path in CHAPTERS:
        anchors = link.findall(text_of(pages, f"notebooks/{path.stem}"))
        assert len(anchors) >= 5, path.stem
        assert len(anchors) == len(set(anchors)), path.stem


def test_a_term_has_its_definition_as_title(pages: Path) -> None:
    links = re.findall(r'<a class="reflib-term[^>]*>', text_of(pages, "notebooks/fusion"))
    assert links and all(re.search(r' title="[^"]{20,}\."', link) for link in links)
    everything = "".join(text_of(pages, f"notebooks/{p.stem}") for p in CHAPTERS)
    assert 'title="Operations per byte moved. Below the ridge' in everything


def test_everything_from_elsewhere_has_a_notice(pages: Path) -> None:
    assert notices.unnamed(pages, ROOT / "book") == []
    text = (pages / notices.FILE).read_text(encoding="utf-8")
    for notice in notices.notices(ROOT / "book"):
        assert notice.name in text and notice.full_text(ROOT / "book") in text
        assert any(next(pages.glob(pattern), None) for pattern in notice.files), f"nothing of {notice.name} is there"


def test_a_file_without_a_notice_is_found(tmp_path: Path) -> None:
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "jquery.js").write_text("")
    (tmp_path / "_static" / "basic.css").write_text("")
    assert notices.unnamed(tmp_path, ROOT / "book") == ["_static/jquery.js"]


# ---- the checks find what they look for


@pytest.mark.parametrize(
    "text, found",
    [
        ('<script src="https://cdn.example/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example/f.css">', 1),
        ('<img src="http://example/x.png">', 1),
        ("<style>@import 'https://example/x.css';</style>", 1),
        ('<p style="background: url(https://example/x.png)">', 1),
        ('<a href="https://example.com">a</a><script src="_static/x.js"></script>', 0),  # a link is not fetched
    ],
)
def test_what_would_be_fetched_is_found(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "page.html").write_text(f"<html>{text}</html>")
    assert len(book_checks.outside_references(tmp_path)) == found


def test_what_is_wrong_with_pages_is_found(tmp_path: Path) -> None:
    """Links that go nowhere, figures without words, heavy pages."""
    (tmp_path / "a.html").write_text(
        '<h1 id="top">a</h1><a href="b.html#there">1</a><a href="#top">2</a><a href="https://x.example/#y">3</a>'
        '<a href="c.html">4</a><a href="b.html#gone">5</a><img src="no.png" alt="x"><a href="mailto:a@b.c">6</a>'
        '<figure><img src="data:," alt="two bars"><figcaption>Bars.</figcaption></figure>'
        '<figure><img src="data:,"><figcaption>Bars.</figcaption></figure>'
        '<figure><div role="img" aria-label="a line"></div></figure>'
    )
    (tmp_path / "b.html").write_text('<p id="there">b</p>')
    assert book_checks.broken_links(tmp_path) == [
        "a.html: c.html is not there", "a.html: b.html#gone has no such anchor", "a.html: no.png is not there",
    ]  # fmt: skip
    assert book_checks.wordless_figures(tmp_path) == [
        "a.html: figure 1 (<img>) has no caption", "a.html: figure 3 (<figure>) has no alt text",
        "a.html: figure 4 (<figure>) has no caption",
    ]  # fmt: skip
    (tmp_path / "book").mkdir()
    for page in ("index", "b"):
        (tmp_path / "book" / f"{page}.html").write_text('<img src="a.png" alt="a">')
    (tmp_path / "book" / "a.png").write_bytes(bytes(book_checks.LANDING_LIMIT))
    (found,) = book_checks.heavy_pages(tmp_path)
    assert found.startswith("book/index.html: 1,000,0")


# -- claims are boxes -----------------------------------------------------------------------------------
def test_claims_become_boxes_between_the_other_lines() -> None:
    text = (
        "a copy: 13 GB/s\n✗ Does not hold here: 1 < 2 & more\n  Why: the cache\n  is large\n✓ Holds here: yes\n"
        "? Not measured on this machine: x\n  no GPU\nafter\n"
    )
    block = nodes.literal_block(text, text, classes=["output", "stream"], language="myst-ansi")
    first, *boxes, last = claims.pieces(block, text)
    assert first.astext() == "a copy: 13 GB/s\n" and last.astext() == "after\n" and last["classes"] == block["classes"]
    fails, holds, unmeasured = (b.astext() for b in boxes)
    assert 'class="reflib-claim fails"' in fails and "<p>is large</p>" in fails
    assert "<strong>✗ Does not hold here:</strong> 1 &lt; 2 &amp; more" in fails
    assert 'class="reflib-claim holds"' in holds and 'class="reflib-claim unmeasured"' in unmeasured
    assert not claims.CLAIM.search("is it so? A question: no claim\n")


def test_long_listings_of_outputs_are_folded() -> None:
    output = nodes.container(nb_element="cell_code_output")
    output += nodes.literal_block("", "a")
    assert claims.in_output(output[0]) and not claims.in_output(nodes.literal_block("", "a"))
    begin, block, end = claims.folded(output[0], 1234)
    assert begin.astext() + end.astext() == '<details class="reflib-long"><summary>1,234 lines</summary></details>'
    assert block is output[0]


def test_the_drawing_has_all_stages() -> None:
    svg, words = extension("reflib_book").pipeline_svg()
    assert all(f">{stage}</text>" in svg and f"{stage} takes" in words for stage in ("autotune", "schedule", "package"))


# -- how long a chapter takes: what it says, and what its words, code and outputs come to -------------
FOLDED = {"hide-input", "hide-cell", "solution"}  # tags of cells whose code the book folds


def minutes_to_read(path: Path) -> float:
    """Prose at 200 words a minute, 5 seconds for a line of code that is not folded, 1 for a line of output; not set-up
    and exercises."""
    words = lines = shown = 0
    exercises = False
    for number, cell in enumerate(nb.read(path).cells):
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                exercises = line.startswith("## Exercises") if line.startswith("## ") else exercises
                words += 0 if exercises else len(line.split())
        elif not exercises and number > 3:
            shown += sum(lines_of(output) for output in cell.outputs)
            if not FOLDED & set(cell.metadata.get("tags", [])):
                lines += sum(1 for line in cell.source.splitlines() if line.strip())
    return words / 200 + lines * 5 / 60 + shown / 60


def lines_of(output: Any) -> int:
    """Of an output: its lines or rows, of a listing no more than the page unfolds; a figure counts as ten."""
    if output.output_type == "stream":
        return min(len(output.text.splitlines()), claims.LONG)
    data = output.get("data", {})
    if "text/html" in data:
        return data["text/html"].count("<tr>") or 10
    if any("vega" in mime for mime in data):
        return 10
    text = data.get("text/markdown") or data.get("text/plain", "")
    return min(len(text.splitlines()), claims.LONG)


@pytest.mark.parametrize("path", runner.notebooks(), ids=lambda p: p.stem)
def test_a_chapter_says_how_long_it_takes_and_it_is_so(path: Path) -> None:
    """To a quarter, and it is 45 at most: a longer chapter becomes two."""
    said, counted = data.chapter(path).minutes, minutes_to_read(path)
    assert abs(counted - said) <= said / 4, f"{counted:.0f} minutes are counted"
    assert said <= 45 and counted < 47, f"{counted:.0f} minutes are counted"


def test_times_are_read(tmp_path: Path) -> None:
    assert data.minutes_in("About 40 minutes to read, an hour with the exercises; about a minute to run.") == 40
    assert data.minutes_in("Ten minutes to read and do; under a minute to run.") == 10
    with pytest.raises(ValueError, match="no number of minutes"):
        data.minutes_in("About an hour.")
