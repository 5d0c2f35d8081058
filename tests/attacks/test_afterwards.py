"""What users do to an optimized model after it was captured, and from other threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from fxopt.config import Config
from fxopt.optimize import optimize
from tests.attacks.attack import UNCHECKED, _same


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(3))
        self.tower = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 1))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        return self.tower(torch.cat([dense, rows.flatten(1)], 1))


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale


def swapped(model: nn.Module) -> None:
    new = nn.Parameter(torch.full_like(model.tower[0].weight, 0.25))
    torch.utils.swap_tensors(model.tower[0].weight, new)


def converted_by_swap(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def wrapped(model: nn.Module) -> None:
    model.tower[0] = LowRank(model.tower[0])


def hooked(model: nn.Module) -> None:
    model.tower[1].register_forward_hook(lambda module, given, result: result * 2)


def another_layer(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.tower[2] = nn.Linear(8, 1)


def edited(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def smaller_data(model: nn.Module) -> None:
    model.tables[0].weight.data = model.tables[0].weight.data[:15].clone()


def transposed_data(model: nn.Module) -> None:
    model.tower[0].weight.data = model.tower[0].weight.data.t().contiguous().t()


ACTIONS: dict[str, Callable[[nn.Module], nn.Module | None]] = {
    "swap_tensors": swapped,
    "double_by_swap": converted_by_swap,
    "double": lambda m: m.double() and None,
    "bfloat16": lambda m: m.bfloat16() and None,
    "load_assigned": assigned,
    "save_and_load": saved,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "wrap_a_layer": wrapped,
    "hook_inside": hooked,
    "replace_a_layer": another_layer,
    "edit_weights": edited,
    "smaller_table": smaller_data,
    "transposed_weight": transposed_data,
    "parametrize": lambda m: parametrize.register_parametrization(m.tower[0], "weight", Halved()) and None,
    "prune": lambda m: prune.l1_unstructured(m.tower[0], "weight", 0.5) and None,
    "train": lambda m: m.train() and None,
    "freeze": lambda m: m.requires_grad_(False) and None,
    "share_memory": lambda m: m.share_memory() and None,
}


def made() -> Ranker:
    torch.manual_seed(0)
    return Ranker().eval()


def given(batch: int = 5, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(batch)  # of its own: other threads draw, too
    return torch.randn(batch, 3, generator=numbers).to(dtype), torch.randint(0, 15, (batch, 3), generator=numbers)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("act", ACTIONS.values(), ids=ACTIONS)
def test_used_on(act: Callable[[nn.Module], nn.Module | None], grad: bool) -> None:
    eager, fast = made(), optimize(made(), config=UNCHECKED)
    with torch.set_grad_enabled(grad):
        _same("before", eager(*given()), fast(*given()))
        eager, fast = act(eager) or eager, act(fast) or fast
        for batch in (5, 2):
            arguments = given(batch, eager.tower[2].weight.dtype)
            _same("after", eager(*arguments), fast(*arguments))
    assert [name for name, _ in eager.named_parameters()] == [name for name, _ in fast.named_parameters()]


def together(*jobs: Callable[[], None]) -> None:
    """Run the jobs at the same time; the first error of any of them is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            start.wait(30)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_calls_while_others_capture() -> None:
    """Calls of a captured model find their entry, whatever is captured beside them."""
    served, expected, others = optimize(made(), config=UNCHECKED), made(), [made() for _ in range(4)]
    with torch.no_grad():
        served(*given())
    done = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not done.is_set():
                _same("served", expected(*given()), served(*given()))

    def capture() -> None:
        try:
            with torch.no_grad():
                for other in others:
                    optimize(other, config=UNCHECKED)(*given(3))
        finally:
            done.set()

    together(call, capture)
    assert len(served._fxopt.entries) == 1  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("config", [UNCHECKED, Config()], ids=["unchecked", "default"])
def test_first_calls_at_once(config: Config) -> None:
    """Six threads, two models, with and without gradients: one capture each."""
    models = [optimize(made(), config=config) for _ in range(2)]
    expected = made()

    def job(model: nn.Module, grad: bool, batch: int) -> Callable[[], None]:
        def call() -> None:
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    _same("first", expected(*given(batch)), model(*given(batch)))

        return call

    together(*(job(model, grad, batch) for model in models for grad in (False, True) for batch in (4, 7)))
    for model in models:
        assert len(model._fxopt.entries) == 2  # type: ignore[union-attr, arg-type]
        assert all(entry.executable for entry in model._fxopt.entries)  # type: ignore[union-attr]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.more, self.tower = nn.ModuleList(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.more:
            x = layer(x)
        return self.tower(x)


LISTS: dict[str, Callable[[Lists], object]] = {
    "an_empty_list_is_filled": lambda m: m.more.append(nn.Tanh()),
    "another_dict": lambda m: m.tower.__delitem__(1),
    "edited_in_the_other_dict": lambda m: m.tower.insert(0, nn.Sigmoid()),
    "replaced_in_the_other_dict": lambda m: m.tower.__setitem__(0, nn.Softplus()),
    "emptied": lambda m: m.more.pop(0),
}


def test_lists_of_modules() -> None:
    torch.manual_seed(0)
    eager = Lists()
    fast, x = optimize(copy.deepcopy(eager), config=UNCHECKED), torch.randn(3, 4)
    for name, act in {"as made": lambda m: None, **LISTS}.items():
        act(eager), act(fast)
        _same(name, eager(x), fast(x))


def test_lazy_layers_are_captured_once_they_have_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    fast, x = optimize(model), torch.randn(5, 4)
    _same("first", fast(x), model(x))
    _same("second", model(x), fast(x))
    assert any(entry.executable for entry in fast._fxopt.entries)  # type: ignore[union-attr]


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1


def test_what_inference_mode_made_is_edited_once() -> None:
    """Elsewhere torch edits it, and then raises."""
    fast, sides = optimize(Doubled(), config=UNCHECKED), []
    fast(torch.ones(2, 2))
    for model in (Doubled(), fast):
        with torch.inference_mode():
            x = torch.ones(3, 2)
        with pytest.raises(RuntimeError, match="inference tensor"):
            model(x)
        sides.append(x)
    assert torch.equal(*sides)
