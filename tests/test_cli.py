"""`python -m fxopt`: what a person sees, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fxopt
from fxopt import cli
from fxopt.kernels import build, cuda_build
from fxopt.kernels.libraries import CUDA_LIBRARIES
from fxopt.report import contenders, turns
from tests.cuda import fake_nvcc

MODEL = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))
            self.top = nn.Linear(12, 1)

        def forward(self, ids):
            return self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1))

    def build_model():
        return Model()

    def other():
        print("building the other one")
        return nn.Linear(3, 1).double()

    def no_model():
        return 3

    def example_inputs(batch_size):
        return (torch.randint(0, 10, (batch_size, 3)),)
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """run(source, *options): `fxopt report` of a file with that source. Exit code, stdout, stderr."""
    monkeypatch.setattr(turns, "SECONDS", 0.02)
    monkeypatch.setattr(turns.Turns, "distrust", "")  # the machine may be busy with other tests
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    before = set(sys.modules)

    def call(source: str, *options: str, factory: str = "") -> tuple[int, str, str]:
        file = tmp_path / "model_for_cli.py"
        file.write_text(textwrap.dedent(source))
        code = cli.main(["report", f"{file}{factory}", *(options or ("--batch", "1,4"))])
        return code, *capsys.readouterr()

    yield call
    for name in set(sys.modules) - before:
        if name.startswith("model_for_cli"):
            del sys.modules[name]


def test_report(run: Run) -> None:
    code, out, err = run(MODEL)
    assert code == 0
    assert err == ""  # no progress bar where stderr is no terminal
    assert "fxopt report: Model" in out
    assert "3 lookups in 1 call" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row[:1] in (["1"], ["4"])] == ["1", "4"]
    assert "differs" not in out


def test_json_to_a_file_beside_the_text(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(MODEL, "--batch", "2", "--json", str(tmp_path / "report.json"))
    assert code == 0 and "fxopt report" in out
    data = json.loads((tmp_path / "report.json").read_text())
    (found,) = data["signatures"]
    assert [m["batch"] for m in found["measurements"]] == [2]
    assert found["measurements"][0]["speedup"] > 0
    assert sum(spent["share"] for spent in found["measurements"][0]["spending"]) == pytest.approx(1)


def test_json_to_stdout_is_nothing_but_json(run: Run) -> None:
    source = MODEL.replace("return Model()", "print('chatty'); return Model()")
    code, out, err = run(source, "--json", "-", "--batch", "2")
    assert code == 0 and "chatty" in err
    assert json.loads(out)["model"] == "Model"


def test_factory_and_a_model_that_rejects_the_inputs(run: Run) -> None:
    code, out, err = run(MODEL, factory=":other")
    assert code == 1
    assert "the model raised RuntimeError" in err
    assert "It was given example_inputs(1): int64 [1, 3]" in err
    assert "building the other one" in out


def test_a_model_that_raises_names_its_own_line(run: Run) -> None:
    source = MODEL.replace("(0, 10,", "(10, 20,")
    code, _, err = run(source)
    assert code == 1
    assert "the model raised IndexError: index out of range" in err
    assert "model_for_cli.py:12, in" in err and "torch.cat([table(ids[:, i])" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("source", "factory", "code", "message"),
    [
        ("x = 1", "", 2, "has no build_model(), which builds the model: found no function at all"),
        ("def make(): pass", "", 2, "found make(); model_for_cli.py:NAME uses another one"),
        ("def build_model(): pass", "", 2, "has no example_inputs()"),
        (MODEL, ":nope", 2, "has no nope()"),
        (MODEL, ":", 2, "expected the name of a function after the colon, found ''"),
        (MODEL, ":no_model", 2, "no_model() returned a int; expected an nn.Module"),
        (MODEL.replace("(torch.randint(0, 10, (batch_size, 3)),)", "torch.ones(2)"), "", 2, "returned float32 [2]"),
        (MODEL.replace("return Model()", "return 1 // 0"), "", 1, "build_model() raised ZeroDivisionError"),
        (MODEL.replace("batch_size, 3", "batch_siz, 3"), "", 1, "example_inputs(1) raised NameError"),
        ("import missing_package", "", 1, "model_for_cli.py:1, in <module>\n    import missing_package"),
        ("def f(:\n  pass", "", 1, "importing it raised SyntaxError"),
        ("raise SystemExit(3)", "", 1, "importing it raised SystemExit"),
    ],
)
def test_what_is_wrong_with_the_file(run: Run, source: str, factory: str, code: int, message: str) -> None:
    found, out, err = run(source, factory=factory)
    assert found == code
    assert message in err
    assert out == "" and "Traceback" not in err


def test_no_such_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["report", "nowhere/model.py"]) == 2
    assert "no such file: nowhere/model.py" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is a folder; expected a Python file" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["", "0", "a", "1,,2", "-1", "1.5"])
def test_bad_batch(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", "model.py", f"--batch={sizes}"])
    assert stopped.value.code == 2
    assert "expected positive numbers" in capsys.readouterr().err


def test_json_that_cannot_be_written_is_said_before_the_work(run: Run) -> None:
    code, _, err = run("raise SystemExit", "--json", "/nowhere/report.json")
    assert code == 2
    assert "--json /nowhere/report.json: cannot write there" in err


def test_build_says_where_the_kernels_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "nvcc", lambda: None)
    assert cli.main(["build"]) == 0
    *libraries, cuda, seconds = capsys.readouterr().out.splitlines()
    assert libraries and all(Path(line.split(": ", 1)[1]).exists() for line in libraries)
    assert cuda.startswith("CUDA kernels were not built: nvcc is not on PATH")
    assert seconds.endswith(" s")


def test_build_without_a_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    assert cli.main(["build"]) == 1
    assert capsys.readouterr().err.count("no C++ compiler") == 1


@pytest.fixture
def cuda_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is built for CUDA, where nothing of C++ is."""
    monkeypatch.setattr(build, "find", lambda library: tmp_path)
    monkeypatch.setattr(build, "build", lambda library: tmp_path)
    return [library.name for library in CUDA_LIBRARIES]


def test_build_for_gpus_elsewhere(
    cuda_alone: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS)
    assert cli.main(["build", "--arch", "sm_80,sm_90a"]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if " for sm_" in line]
    assert [line.split(" built: ")[0] for line in lines] == [
        f"{name} for {arch}" for arch in ("sm_80", "sm_90a") for name in cuda_alone
    ]
    paths = {line.split(": ")[1] for line in lines}
    assert len(paths) == len(lines) and all(Path(path).exists() for path in paths)
    assert err == ""  # no progress bar where stderr is no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    assert cli.main(["build", "--arch", "sm_90a"]) == 0
    out, err = capsys.readouterr()
    assert out.count("for sm_90a was built already: ") == len(cuda_alone)
    assert f"/{out.count('was built already')}" in err


def test_build_for_the_gpus_here(
    cuda_alone: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS, (9, 0), (8, 0), (9, 0), (7, 5))
    assert cli.main(["build"]) == 0
    out = capsys.readouterr().out
    assert [out.count(f"for {arch} built") for arch in ("sm_75", "sm_80", "sm_90a")] == [0, *[len(cuda_alone)] * 2]
    fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS, (7, 5))
    assert cli.main(["build"]) == 0
    assert "CUDA kernels were not built: no GPU for them is here (--arch names others)\n" in capsys.readouterr().out


def test_what_nvcc_cannot_build_keeps_nothing_else(
    cuda_alone: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = f'case "$*" in *sm_80*stage*|*sm_80*cross*) {fake_nvcc.BROKEN} ;; esac\n'
    fake_nvcc.install(monkeypatch, tmp_path, fails + fake_nvcc.WORKS)
    assert cli.main(["build", "--arch", "sm_80,sm_90a"]) == 1
    out, err = capsys.readouterr()
    assert [out.count(f"for {arch} built") for arch in ("sm_80", "sm_90a")] == [len(cuda_alone) - 2, len(cuda_alone)]
    assert err.startswith("fxopt: nvcc could not compile fxopt_stage for sm_80: kernel.cu(3): error: identifier")
    assert err.endswith("1 more could not be built\n")


@pytest.mark.parametrize("names", ["sm_90", "sm_75", "90a", "sm_80,,sm_90a", "sm_80 sm_90a", ""])
def test_architectures_that_there_are_not(
    names: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = fake_nvcc.install(monkeypatch, tmp_path, fake_nvcc.WORKS)
    assert cli.main(["build", "--arch", names]) == 2
    out, err = capsys.readouterr()
    wrong = "" if "," in names else names
    assert err == f"fxopt: --arch: expected names with commas between, of sm_80, sm_90a; found {wrong!r}\n"
    assert out == "" and log.read_text() == ""


def test_architectures_without_nvcc(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "nvcc", lambda: None)
    assert cli.main(["build", "--arch", "sm_80"]) == 1
    assert "no CUDA compiler: nvcc is not on PATH" in capsys.readouterr().err


def test_as_a_command() -> None:
    found = subprocess.run([sys.executable, "-m", "fxopt", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"fxopt {fxopt.__version__}\n")
    found = subprocess.run([sys.executable, "-m", "fxopt"], capture_output=True, text=True)
    assert found.returncode == 2 and "COMMAND" in found.stderr


def test_limits_that_are_missed(run: Run) -> None:
    code, _, err = run(MODEL, "--batch", "1,4", "--fail-under", "1e6")
    assert code == 3
    assert err.count("--fail-under 1e+06: batch ") == 2
    assert run(MODEL, "--batch", "4", "--fail-under", "0.001", "--max-error", "1e-3")[0] == 0


def test_a_busy_machine_misses_the_limit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.Turns, "distrust", "machine busy, do not trust")
    code, out, err = run(MODEL, "--batch", "4", "--fail-under", "0.001")
    assert code == 3
    assert "--fail-under 0.001: batch 4: machine busy, do not trust" in err
    assert "measure again" in out and "x at batch" not in out


def test_an_error_beyond_the_limit(run: Run) -> None:
    code, _, err = run(MODEL, "--batch", "4", "--max-error", "-1")
    assert code == 3 and "--max-error -1: batch 4: " in err


def test_html_and_verbose(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(MODEL, "--batch", "2", "--html", str(tmp_path / "out.html"), "--verbose")
    assert code == 0 and "found no match" in out
    page = (tmp_path / "out.html").read_text()
    assert page.startswith("<!doctype html>") and "python -m fxopt report" in page
    assert "found no match" not in run(MODEL, "--batch", "2")[1]


def test_a_training_step(run: Run) -> None:
    code, out, _ = run(MODEL, "--batch", "4", "--train", "--max-error", "1e-4")
    assert code == 0
    assert "fxopt report: Model, training" in out and "backward" in out
    assert "training steps, forward and backward" in out


def test_a_contender(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(model):
        return lambda *args: model(*args)

    monkeypatch.setitem(contenders.OTHERS, "torch.compile", compiled)
    code, out, _ = run(MODEL, "--batch", "4", "--compare", "torch.compile")
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.split()[:1] == ["4"]]
    assert row.count("(") == 1 and "torch.compile" in out
    monkeypatch.setitem(contenders.OTHERS, "torch.compile", lambda model: lambda *args: model(*args) + 1)
    _, out, _ = run(MODEL, "--batch", "4", "--compare", "torch.compile")
    assert "torch.compile failed: its answer differs from eager's by up to 1" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compare", "magic"), "--compare magic: expected one of torch.compile"),
        (("--device", "nowhere"), "--device nowhere: "),
        (("--html", "/nowhere/out.html"), "--html /nowhere/out.html: cannot write there"),
    ],
)
def test_options_that_mean_nothing(run: Run, options: tuple[str, ...], message: str) -> None:
    code, _, err = run(MODEL, *options)
    assert code == 2 and message in err


def test_diff(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file in files:
        assert run(MODEL, "--batch", "2", "--json", file)[0] == 0
    assert cli.main(["diff", *files]) == 0
    assert "operators per call" in capsys.readouterr().out
    assert cli.main(["diff", files[0], str(tmp_path / "none.json")]) == 2
    assert "none.json: expected a report" in capsys.readouterr().err
