"""What the commands share, and the command that shows the catalogue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.__main__ import main
from kernels.catalogue import CATALOGUE, named_spec
from kernels.command import check_output


@pytest.mark.parametrize(
    "arguments", [["kernels"], ["kernels", "minite"], ["kernels.spec_diff", "minite", "minite"]]
)
def test_a_command_whose_output_nobody_reads_ends_without_a_word(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *arguments], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 141)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_spec_is_shown_with_where_it_comes_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    shown, source = capsys.readouterr().out, CATALOGUE[name].source
    assert shown.startswith(f"{name} {named_spec(name).fingerprint}\n")
    for part in (f"{source.library} {source.version}", source.settings, source.reference):
        assert part in shown
    assert ("\nin " in shown) is bool(source.reference)


def test_a_spec_with_overrides_is_shown_with_the_one_that_it_is_made_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    label = "te_exact[weight.outer_domain=row]"
    assert main([label]) == 0
    shown = capsys.readouterr().out
    overridden = named_spec("te_exact", {"weight.outer_domain": "row"})
    assert shown.startswith(f"{label} {overridden.fingerprint}\nte_exact is computed by Transformer Engine")


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("nothing", "'nothing'; there are: minite, "),
        ("minite[", "name[field=value,...]"),
        ("minite[output=fp64]", "fp64"),
    ],
)
def test_a_spec_that_does_not_exist_is_refused_in_one_line(
    label: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([label])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert named in error and error.count("\n") == 1


def test_a_file_that_could_not_be_written_is_refused_ahead_of_the_work(tmp_path: Path) -> None:
    check_output(tmp_path / "new.json")
    for file, why in ((tmp_path, "is a folder"), (tmp_path / "missing" / "x.json", "there is no folder")):
        with pytest.raises(ValueError, match=why) as refusal:
            check_output(file)
        assert str(file) in str(refusal.value)
