"""plot.py --lineage: what it reads, draws and refuses."""

import pytest

import plot

LINEAGE = """generation,place,id,parent,kind,learning_rate,fitness,steps
0,0,0,,first,1e-3,nan,600
0,1,1,,first,1e-2,20.5,600
1,0,1,1,elite,1e-2,30,1200
1,1,2,1,hyperparameters,3e-3,inf,1200
2,0,3,2,none,3e-3,40,1800
2,1,1,1,of a later version,1e-2,nan,1800
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("learning_rate,", "", "cannot be read (KeyError: 'learning_rate')"),
        ("1,1,2,1,hyper", "1,1,2,7,hyper", "cannot be read (KeyError: (0, 7))"),
        ("1e-3,nan", "0,nan", "cannot be read (ValueError: learning_rate 0.0)"),
        ("1e-3,nan,600", "1e-3", "cannot be read (TypeError: "),
        ("1e-3,nan,600", "1e-3,x,600", "cannot be read (ValueError: could not convert string to float: 'x')"),
        ("0,0,0", "\xff", "cannot be read (UnicodeDecodeError: "),
        (LINEAGE[LINEAGE.index("0,0,0") :], "", "no generation has ended yet"),
    ],
)
def test_plot_names_a_broken_lineage(old, new, message, tmp_path, refused):
    (tmp_path / "lineage.csv").write_bytes(LINEAGE.replace(old, new).encode("latin1"))
    assert message in refused(plot.main, [".", "--lineage"])


def test_plot_draws_the_line_of_the_last_fittest_member(tmp_path):
    (tmp_path / "lineage.csv").write_text(LINEAGE)
    lineage = plot.read_lineage(tmp_path)
    assert {(member.generation, member.id) for member in lineage.line} == {(0, 1), (1, 2), (2, 3)}
    plt = plot.pyplot(tmp_path / "x.png")
    figure, (tree, rates) = plt.subplots(2)
    plot.draw_lineage(figure, tree, rates, lineage)
    thick = [list(line.get_xdata()) for line in tree.get_lines() if line.get_linewidth() > 1]
    assert sorted(thick) == [[0, 1], [1, 2]]
    assert len(tree.get_lines()) == len(rates.get_lines()) == 4, "a line from each parent to each child"
    shown = [text.get_text() for text in tree.get_legend().get_texts()]
    assert shown == ["first", "elite", "none", "hyperparameters", "of a later version"]
    assert rates.get_yscale() == "log"
    plt.close("all")


def test_plot_writes_several_lineages(tmp_path, run_inline):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lineage.csv").write_text(LINEAGE)
    done = run_inline("plot.py", "a", "b", "c", "--lineage", "--out", "x.png")
    assert done.code == 0
    assert done.out == "x.png: 2 runs, 8 members\n"
    assert "skipped: runs=c: there is no lineage.csv in this folder" in done.err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
