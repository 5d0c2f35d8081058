"""The TorchRec scripts of examples/dlrm: fxopt changes no loss, a run resumes, a checkpoint fits the whole model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, launch, outputs

pytest.importorskip("torchrec")
pytest.importorskip("torchmetrics")
EXAMPLE = ROOT / "examples" / "dlrm"
sys.path.insert(0, str(EXAMPLE))

from generate import generate  # noqa: E402  (the scripts import each other by their bare names)

pytestmark = pytest.mark.slow  # each process needs seconds to import torchrec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("torchrec")
    generate(made / "rows.tsv", rows=3_000)
    return made


def trained(folder: Path, checkpoint: str, *more: str) -> dict[int, float]:
    """The loss of each step."""
    fixed = ["--batch-size", "32", "--report-every", "1", "--checkpoint", folder / checkpoint]
    ranks = launch(["torchrec_train.py", folder / "rows.tsv", *fixed, *more], EXAMPLE)
    first, _ = outputs(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], first[-3000:]
    found = re.findall(r"^step (\d+): loss ([\d.]+)", first, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_a_run_resumes_where_it_was(folder: Path) -> None:
    expected = trained(folder, "eager", "--steps", "6")
    begun = trained(folder, "fast", "--steps", "3", "--optimize")
    gone_on = trained(folder, "fast", "--steps", "6", "--optimize", "--resume")
    assert (list(begun), list(gone_on)) == ([1, 2, 3], [4, 5, 6])
    assert {**begun, **gone_on} == pytest.approx(expected, rel=1e-4)


def test_the_checkpoint_is_evaluated_without_sharding(folder: Path) -> None:
    import fxopt
    import torchrec_eval

    trained(folder, "fast", "--steps", "2", "--optimize")
    model = torchrec_eval.load(folder / "fast")
    torch.manual_seed(0)
    before = torchrec_eval.build().state_dict()
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items() if "weight" in name)
    fast = fxopt.optimize(model, config=fxopt.Config(tune="off"))
    aucs, difference = torchrec_eval.compared({"eager": model, "optimized": fast}, folder / "rows.tsv")
    assert aucs["optimized"] == pytest.approx(aucs["eager"], abs=1e-4)
    assert difference < 1e-4
