"""The first hour, from an empty folder to a program of one's own, and the documentation as a site of pages."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from harness import ROOT, default_signals

# ---- the first hour


PAGE = ROOT / "docs" / "first_hour.md"
SHORTER = {
    "100_000": "4_000", "120_000": "4_400", "--eval-every 25_000": "--eval-every 4_000 --eval-episodes 2",
    "--random": "--random --episodes 2", "--episodes 30": "--episodes 2",
}  # fmt: skip
"""what makes a test of seconds of it"""
INSTALLS = ("python3 -m venv", ". .venv", "pip install")


def steps(text):
    """(file, code) of each Python block and ("", line) of each shell line, in the order of the page."""
    for language, block in re.findall(r"^```(python|bash)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            yield re.match(r"# (\w+\.py)\n", block)[1], block
        else:
            yield from (("", line) for line in block.splitlines() if not line.startswith(INSTALLS))


def test_the_first_hour_leads_to_a_program_of_ones_own(run_inline, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(tmp_path)
    text = PAGE.read_text()
    for old, new in SHORTER.items():
        assert old in text
        text = text.replace(old, new)
    printed = {}
    for file, code in steps(text):
        if file:
            (tmp_path / file).write_text(code)
            continue
        program, *words = shlex.split(code)
        if program == "a3c-mp":
            number = 2 if words[0] == "train" else 1
            done = run_inline(f"{'_'.join(words[:number])}.py", *words[number:], name="heater")
            assert done.code == 0, done.err
            printed[code] = done.out
        else:
            runpy.run_path(words[0])
            printed[code] = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} >= {"heater.onnx", "curve.png", "control.py", "runs"}
    assert re.match(r"MLP 64 64 for heater:Heater-v0 takes .*'shape': \[2\]", printed["python control.py"])
    assert "degrees away from 20" in printed["python control.py"]
    assert "random actions" in printed["a3c-mp play runs/heater --random --episodes 2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_hour_as_it_is_written(tmp_path):
    """All but the installation, in processes; the policy keeps the room near 20 degrees."""
    command = [sys.executable, "-c", "from a3c_mp.run.command import main; main()"]
    programs = {"a3c-mp": command, "python": [sys.executable]}
    found = {}
    for file, code in steps(PAGE.read_text()):
        if file:
            (tmp_path / file).write_text(code)
            continue
        program, *words = shlex.split(code)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*programs[program], *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, preexec_fn=default_signals,
        )  # fmt: skip
        assert done.returncode == 0, (code, done.stderr)
        found[code] = done.stdout
    print(found)
    at_random, trained = (
        float(re.search(r"^mean (\S+),", found[f"a3c-mp play runs/heater {flags}"], re.MULTILINE)[1])
        for flags in ("--random", "--episodes 30")
    )
    assert trained > 0.25 * at_random
    assert float(re.search(r"(\S+) degrees away", found["python control.py"])[1]) < 2


# ---- the site


class Html(HTMLParser):
    """Links, anchors, and text of paragraphs outside of code, of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.paragraphs, self.open = [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        if tag in ("p", "code"):
            self.open.append(tag)
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            self.open.remove(tag)

    def handle_data(self, data):
        if self.open == ["p"]:
            self.paragraphs[-1] += data


def faults(site):
    """What is wrong with the pages of a folder: links that lead nowhere, anchors without a place, raw Markdown."""
    pages = {path: Html(path.read_text()) for path in site.rglob("*.html")}
    found = defaultdict(set)
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchors = pages[target].anchors if target in pages else {unquote(address.fragment)}
            if not target.exists() or (address.fragment and unquote(address.fragment) not in anchors):
                found[path.name].add(link)
        found[path.name] |= {text for text in page.paragraphs if re.search(r"^(- |\d+\. |\|.*\|$|```)", text, re.M)}
    return {name: these for name, these in found.items() if these}


def test_faults_of_a_page_are_found(tmp_path):
    (tmp_path / "other.html").write_text('<h2 id="here">Here</h2>')
    good = '<a href="other.html#here">1</a><a href="https://x.org/y">2</a><p>text<code>- x</code></p>'
    bad = '<a href="none.html">1</a><a href="other.html#there">2</a><img src="x.png"><p>a list:\n- one</p>'
    (tmp_path / "good.html").write_text(good)
    (tmp_path / "bad.html").write_text(bad)
    assert faults(tmp_path) == {"bad.html": {"none.html", "other.html#there", "x.png", "a list:\n- one"}}


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "INFO" in done.stderr, "warnings count only where they are printed"
    assert faults(tmp_path / "site") == {}
    reference = (tmp_path / "site" / "api.html").read_text()
    assert len(re.findall(r'id="a3c_mp\.[\w.]+"', reference)) > 40
    assert "fonts.googleapis" not in reference
