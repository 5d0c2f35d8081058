"""The dense layers of recommendation models: towers, experts and gates, crosses, norms, products."""

from __future__ import annotations

from tests.fuzz.pointwise import ACTIVATIONS
from tests.fuzz.writer import Value, Writer

_MODULES = (
    "nn.ReLU()",
    "nn.Sigmoid()",
    "nn.PReLU()",
    "nn.SiLU()",
    "nn.ReLU6()",
    "nn.Hardtanh()",
    "nn.GELU()",
    "nn.Tanh()",
)


def linear(w: Writer) -> Value | None:
    x, out = w.float(w.pick((2, 2, 2, 3, None))), w.size()
    if not x.rank or x.shape[-1] > 64:
        return None
    n, bias = x.shape[-1], w.chance(80)
    if w.chance(70):
        return w.line(f"{w.state('l', f'nn.Linear({n}, {out}, bias={bias})')}({x})")
    weight, offset = w.parameter(out, n), w.parameter(out)
    ways = (
        "F.linear({x}, {w}, {b})",
        "F.linear({x}, {w})",
        "{x} @ {w}.t()",
        "{x} @ {w}.t() + {b}",
        "torch.matmul({x}, {w}.mT) + {b}",
        "torch.addmm({b}, {x}, {w}.t())",
        "torch.einsum('...i,oi->...o', {x}, {w})",
        "F.linear({x}, {w}.abs(), {b})",
        "F.linear({x}, torch.softmax({w}, -1))",
    )
    return w.line(w.pick(ways).format(x=x, w=weight, b=offset))


def recurrent(w: Writer) -> Value | None:
    """nn.GRU over the middle or the first axis: its states, its last ones, or both."""
    x = w.float(3)
    if x.shape[-1] > 64:
        return None
    options = f"{w.pick((1, 1, 2))}, {w.chance(70)}, {w.chance(60)}, bidirectional={w.chance(10)}"
    layer = w.state("gru", f"nn.GRU({x.shape[-1]}, {w.size()}, {options})")
    ways = (
        "{l}({x})[0]",
        "{l}({x})[1]",
        "{l}({x})[0].sum(1)",
        "{l}({x})[1][-1]",
        "torch.cat({l}({x})[::-1])",
        "{l}({x})[0][:, -1]",
    )
    return w.line(w.pick(ways).format(l=layer, x=x))


def mlp(w: Writer) -> Value | None:
    """nn.Sequential, or layer by layer with functions between."""
    x = w.rows() if w.chance(80) else w.float(3)
    n = x.shape[-1]
    if n > 64:
        return None
    if w.chance(60):
        return w.line(f"{w.state('mlp', _sequential(w, n, x.rank))}({x})")
    value: Value | None = x
    for _ in range(w.pick((1, 2, 3))):
        out = w.size()
        value = w.line(f"{w.state('l', f'nn.Linear({n}, {out})')}({value})")
        value = value and w.line(w.pick(ACTIVATIONS).format(x=value))
        if value is None:
            return None
        n = out
    return value


def _sequential(w: Writer, n: int, rank: int = 2, out: int | None = None) -> str:
    made = []
    for last in [False] * w.pick((0, 1, 1, 2)) + [True]:
        wide = out if last and out else w.size()
        made.append(f"nn.Linear({n}, {wide})")
        if w.chance(25) and rank == 2:
            made.append(w.pick((f"nn.BatchNorm1d({wide})", f"nn.LayerNorm({wide})")))
        if w.chance(15 if last else 95):
            made.append(w.pick(_MODULES))
        if w.chance(10):
            made.append("nn.Dropout(0.0)")
        n = wide
    return f"nn.Sequential({', '.join(made)})"


def towers(w: Writer) -> Value | None:
    """The same layers many times over: experts on one input, towers on fields, with gates that mix them."""
    count, out = w.pick((2, 2, 3)), w.size()
    if w.chance(60):
        x = w.rows()
        seen = f"{x}"
        if w.chance(20):
            seen = w.pick((f"{x}.transpose(0, 1).reshape({x}.shape)", f"{x}.flip(0)", f"{x} * 1", f"{x}.roll(1, 0)"))
        call, n = "t({seen})", x.shape[-1]
    else:
        x = w.cube(fields=True)
        seen, call, n, count = f"{x}", "t({seen}[:, i])", x.shape[2], x.shape[1]
    if count > 8 or n > 64:
        return None
    layers = _sequential(w, n, out=out) if w.chance(60) else f"nn.Linear({n}, {out})"
    name = w.state("towers", f"nn.ModuleList([{layers} for _ in range({count})])")
    call = w.pick(("{c}", "torch.relu({c})", "torch.sigmoid({c})", "{c} * 2", "F.relu6({c})")).format(c=call)
    each = f"[{call.format(seen=seen)} for i, t in enumerate({name})]"
    kind = w.pick(("stack", "stack", "stack 0", "cat", "sum", "unpacked"))
    if kind == "unpacked":
        found = w.unpacked(each)
        return found[-1] if found else None
    mixed = {"stack": f"torch.stack({each}, 1)", "stack 0": f"torch.stack({each})", "cat": f"torch.cat({each}, -1)"}
    value = w.line(mixed.get(kind, f"sum({each})"))
    if value is None or kind != "stack" or w.chance(30) or n > 64:
        return value
    return _gated(w, x if x.rank == 2 else value, value)


def _gated(w: Writer, x: Value, experts: Value) -> Value | None:
    count = experts.shape[1]
    given = f"{x}" if x.rank == 2 else f"{x}.mean(1)"
    gate = w.line(f"torch.softmax({w.state('gate', f'nn.Linear({x.shape[-1]}, {count})')}({given}), -1)")
    ways = (
        "({e} * {g}.unsqueeze(-1)).sum(1)",
        "torch.einsum('be,bed->bd', {g}, {e})",
        "torch.bmm({g}.unsqueeze(1), {e}).squeeze(1)",
        "({g}.unsqueeze(1) @ {e})[:, 0]",
        "sum({g}[:, i:i + 1] * {e}[:, i] for i in range({n}))",
    )
    return gate and w.line(w.pick(ways).format(e=experts, g=gate, n=count))


def cross(w: Writer) -> Value | None:
    """Cross layers: DCN, DCN-v2, gates over fields."""
    x = w.rows()
    n = x.shape[-1]
    if n > 32:
        return None
    first, second, bias = w.state("l", f"nn.Linear({n}, {n})"), w.parameter(n), w.parameter(n)
    ways = (
        "{x} * {l}({x}) + {x}",
        "{x} * ({x} @ {v}).unsqueeze(-1) + {b} + {x}",
        "{x} * ({x} * {v}).sum(-1, keepdim=True) + {b} + {x}",
        "{x} * torch.sigmoid({l}({x}))",
        "{x} + torch.relu({l}({x}))",
        "torch.sigmoid({l}({x})) * 2 * {x}",
        "torch.bmm({x}.unsqueeze(2), {l}({x}).unsqueeze(1)).flatten(1)",
    )
    return w.line(w.pick(ways).format(x=x, l=first, v=second, b=bias))


def norm(w: Writer) -> Value | None:
    """Batch and layer norms, and Dice."""
    x = w.float(w.pick((2, 2, 3)))
    n = x.shape[-1]
    if n > 64:
        return None
    if w.chance(40):
        return w.line(f"{w.state('norm', f'nn.LayerNorm({n})')}({x})")
    if x.rank == 3:
        return w.line(f"{w.state('norm', f'nn.BatchNorm1d({n})')}({x}.transpose(1, 2)).transpose(1, 2)")
    affine = w.pick(("", "", ", affine=False", ", momentum=None", ", track_running_stats=False"))
    name = w.state("norm", f"nn.BatchNorm1d({n}{affine})")
    if w.chance(30):  # Dice
        alpha = w.parameter(n)
        gate = w.line(f"torch.sigmoid({name}({x}))")
        return gate and w.line(f"{gate} * {x} + (1 - {gate}) * {alpha} * {x}")
    return w.line(f"{name}({x})")


def product(w: Writer) -> Value | None:
    """matmul, bmm and einsum of whatever fits, in random subscripts."""
    x = w.float(w.pick((2, 3, 3)))
    y = w.any(lambda v: v.floats and v.sample.dtype is w.dtype and v.rank in (2, 3)) or x
    if w.chance(40):
        return w.line(_einsum(w, x, y))
    ways = (
        "{x} @ {y}",
        "{x} @ {y}.mT",
        "{x}.mT @ {y}",
        "torch.matmul({x}, {y}.transpose(-1, -2))",
        "torch.bmm({x}, {y})",
        "torch.bmm({x}, {y}.transpose(1, 2))",
        "{x} @ {x}.mT",
        "torch.mm({x}, {y}.t())",
        "torch.matmul({x}, {y})",
        "({x} * {y}).sum(-1)",
        "({x} * {y}).sum(-1, keepdim=True)",
        "{x}.unsqueeze(-1) * {y}.unsqueeze(-2)",
        "torch.baddbmm({x}, {x}, {y})",
    )
    order = list(ways)
    w.random.shuffle(order)
    return next((v for way in order[:6] if (v := w.line(way.format(x=x, y=y)))), None)


def _einsum(w: Writer, x: Value, y: Value) -> str:
    """Letters by size: two axes of one size are one letter, or not."""
    letters: dict[int, str] = {}
    unused = list("abcdefgh")
    spelled = []
    for value in (x, y):
        own = ""
        for size in value.shape:
            letter = letters.get(size)
            if letter is None or letter in own or w.chance(15):
                letter = unused.pop(0) if unused else "z"
            letters[size] = letter
            own += letter
        spelled.append(own)
    known = sorted(set("".join(spelled)))
    out = w.random.sample(known, w.random.randrange(min(len(known), 3) + 1))
    if "a" in known and "a" not in out:
        out = ["a", *out][:3]
    return f"torch.einsum('{','.join(spelled)}->{''.join(out)}', {x}, {y})"
