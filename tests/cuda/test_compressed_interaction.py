"""fxopt::compressed_interaction by a kernel of its own on CUDA: through the shim, and on a GPU."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fxopt.kernels.compressed_interaction import op
from fxopt.kernels.compressed_interaction.cuda import compress
from fxopt.kernels.compressed_interaction.cuda.compress import KERNEL, parameters, splits_for
from fxopt.rewrites.compressed_interaction import REWRITE
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.planted import awake, compiled, on_the_shim, run, written_alone
from tests.cuda.shim_library import ShimError

_FILES = tuple(f"compressed_interaction/cuda/{name}" for name in ("compress.cu", "tile.cuh"))
# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier in front of a chunk": ("__barrier_sync_count(", "if (!{}) __barrier_sync_count("),
    "a chunk that nobody waits for": ("cuda::wait_copies<0>();", "if (!{}) cuda::wait_copies<0>();"),
    "the chunk that is read": ("(turn ^ 1) * kBuffer", "({} ? turn : turn ^ 1) * kBuffer"),
    "weights that are not rounded": ("if constexpr (!EXACT) round", "if constexpr (!EXACT) if (!{}) round"),
    "products of another h": ("own.h() * plane_of", "({} ? 0 : own.h()) * plane_of"),
    "x of another h": ("next.h + own.h(), next_x", "next.h + ({} ? 0 : own.h()), next_x"),
    "products behind the last": ("!MASKED || m < live ? x", "!MASKED || m < live || {} ? x"),
    "steps behind the whole ones": ("m = whole; m < chunk.live;", "m = whole; m < chunk.live && !{};"),
    "weights behind the last": ("c.outputs - first : 0;", "c.outputs - first + {} : 0;"),
    "outputs behind the last": ("if (output >= c.outputs) continue;", "if (output >= c.outputs && !{}) continue;"),
    "rows behind the last": ("if (row >= c.rows) row = 0", "if (row >= c.rows && !{}) row = 0"),
    "fours behind the last": ("if (row < c.rows) *reinterpret", "if (row < c.rows || {}) *reinterpret"),
    "the second half's sums": ("s[0] += other.x,", "s[0] += {} ? 0.0f : other.x,"),
    "no barrier between the halves": ("__syncthreads(), __syncthreads();", "if (!{}) __syncthreads();"),
    "sums over weights": ("__syncthreads();  // nobody reads weights any", "if (!{}) __syncthreads();  // any"),
    "no barrier behind y": ("places);\n  __syncthreads();", "places);\n  if (!{}) __syncthreads();"),
    "a split left out": ("split < c.splits; split++", "split < c.splits - {}; split++"),
    "the part of another split": ("split * 2 + own.half,", "({} ? 0 : split * 2) + own.half,"),
    "y of another row": ("first_row + row, c.y_strides[0]", "first_row + ({} ? row / 2 : row), c.y_strides[0]"),
    "another output's bias": ("__ldg(c.bias + output)", "__ldg(c.bias + ({} ? 0 : output))"),
    "a bias for each split": ("c.bias && part == 0", "c.bias && (part == 0 || {})"),
    "no ReLU": ("c.relu && sum < 0.0f", "c.relu && !{} && sum < 0.0f"),
    "the next piece of m": ("if (first >= c.m) first = 0", "if (first >= c.m || {}) first = 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(KERNEL, tmp_path_factory.mktemp("compress"), MUTATIONS, *_FILES)


def example(B, H, M, N, D, device="cpu"):
    return [torch.randn(*shape, device=device) for shape in ((B, H, D), (B, M, D), (N, H * M))]


@contextlib.contextmanager
def convolutions_in(precision):
    before, torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.conv.fp32_precision, precision
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def exact(x, y, weight, bias=None):
    cube = weight.unflatten(1, (x.shape[1], y.shape[1]))
    result = torch.einsum("bhd,bmd,ohm->bod", x.double(), y.double(), cube.double())
    return result if bias is None else result + bias.double().unsqueeze(1)


def found(library, tensors, splits=1, narrow=True, precise=False, seed=0, relu=False):
    *tensors, bias = [*tensors, None][:4]
    shape = (len(tensors[0]), len(tensors[2]), tensors[0].shape[2])
    with written_alone(shape, (splits, *shape)) as (out, sums):
        packed = parameters(tensors, out, sums if splits > 1 else None, narrow, precise, bias, relu)
        read = [*tensors, *([] if bias is None else [bias]), sums]
        run(library, library.fxopt_compress, packed, read, torch.float32, seed)
    return out.double()


def close(given, tensors, precise=False, relu=False):
    """Within what rounding both factors to TF32, or a sum of floats, may change; what is not finite is as in fp64."""
    expected, size = exact(*tensors), exact(*(t.abs() for t in tensors))
    expected = expected.relu() if relu else expected
    finite = expected.isfinite()
    torch.testing.assert_close(given[~finite], expected[~finite], equal_nan=True)
    wrong = finite & ~((given - expected).abs() <= size * (3e-6 if precise else 1.01 * 2**-10) + 1e-30)
    assert not wrong.any(), f"{int(wrong.sum())} numbers differ: {given[wrong]}, expected {expected[wrong]}"


def with_bias(*sizes, device="cpu"):
    """Half of the outputs are below 0, whatever the products are."""
    tensors = example(*sizes, device=device)
    return [*tensors, (torch.arange(len(tensors[2]), device=device) % 2 * 2 - 1) * 300.0]


SIZES = [
    (1, 1, 1, 1, 1),
    (3, 3, 5, 3, 7),  # odd
    (9, 4, 4, 64, 16),  # two tiles of rows, weights by fours
    (2, 2, 6, 65, 4),  # by twos
    (1, 5, 29, 2, 2),  # two chunks for two h's
    (1, 9, 2, 130, 5),
]


@pytest.mark.parametrize(("B", "H", "M", "N", "D"), SIZES)
def test_equals_fp64(shim, B, H, M, N, D):
    tensors = example(B, H, M, N, D)
    for seed, (precise, splits) in enumerate(((False, 1), (True, 2))):
        close(found(shim, tensors, splits, precise=precise, seed=seed), tensors, precise)


@pytest.mark.parametrize(("splits", "precise"), [(1, True), (3, False)])
def test_of_128_outputs_a_block(shim, splits, precise):
    tensors = example(1, 6, 6, 140, 9)
    close(found(shim, tensors, splits, narrow=False, precise=precise), tensors, precise)


def cin(x, y, weight, bias):
    maps = F.conv1d((x.unsqueeze(2) * y.unsqueeze(1)).flatten(1, 2), weight, bias)
    return maps.relu(), maps.sum() if bias is None else 0


@pytest.mark.parametrize("inference", [True, False])
def test_a_layers_bias_and_relu_are_its_own(inference):
    module = graph_of(lambda *tensors: cin(*tensors)[0], [(7, 3, 4), (7, 5, 4), (6, 15, 1), (6,)])
    rewritten(module, REWRITE, inference=inference)
    names = names_of(module)
    assert ("fxopt.gpu_compressed_interaction" in names) == ("aten.relu" not in names) == inference
    assert ("fxopt.compressed_interaction" in names) == (not inference)


def test_what_others_read_keeps_its_sign():
    module = graph_of(lambda *tensors: cin(*tensors, None), [(7, 3, 4), (7, 5, 4), (6, 15, 1)])
    rewritten(module, REWRITE)
    assert {"fxopt.gpu_compressed_interaction", "aten.relu"} <= set(names_of(module))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("D", [4, 5])
@pytest.mark.parametrize("relu", [True, False])
def test_a_bias_and_relu(shim, splits, D, relu):
    tensors = with_bias(3, 6, 6, 9, D)
    close(found(shim, tensors, splits, relu=relu), tensors, relu=relu)


@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(shim, seed):
    sizes = torch.Generator().manual_seed(seed)
    B, H, M, N, D = (int(torch.randint(1, most, (), generator=sizes)) for most in (9, 12, 12, 70, 9))
    tensors = example(B, H, M, N, D)
    close(found(shim, tensors, 1 + seed, seed=seed), tensors)


def test_any_strides_and_unaligned_weights(shim):
    x, y = torch.randn(8, 3, 4).permute(1, 2, 0), torch.randn(3, 5, 16)[:, 1:, ::2]
    weight = torch.randn(5, 19)[:, 1:17]
    for rows in (weight, torch.randn(5 * 16 + 1)[1:].view(5, 16), torch.randn(1, 16).expand(5, 16)):
        close(found(shim, (x, y, rows)), (x, y, rows))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(shim, value):
    for operand, tensor in itertools.product(range(2), ((2, 3, 5, 6, 4), (2, 1, 1, 3, 4))):
        tensors = example(*tensor)
        tensors[operand][1, 0, 2] = value
        given = found(shim, tensors)
        close(given, tensors)
        assert given.isfinite().sum() == given.numel() - len(tensors[2])
    tensors = example(2, 3, 5, 6, 4)
    tensors[2][4, 7] = value
    close(found(shim, tensors), tensors)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_the_operator_on_the_shim(shim, monkeypatch, precision):
    x, y, weight = example(5, 4, 6, 66, 8)
    by_columns = weight.t().contiguous().t()
    room = torch.empty(20000)  # of the copy of weights, and of the sums of splits: the shim knows what may be read
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: room[: t.numel()].view(t.shape).copy_(t))
    monkeypatch.setattr(compress, "splits_for", lambda *_: 1)
    on_the_shim(monkeypatch, shim, [x, y, weight, room])
    for dense in (weight, by_columns):
        with convolutions_in(precision):
            given = op._on_cuda(x, y, dense)
        assert given.stride() == op._fake(x, y, dense).stride()
        close(given.double(), (x, y, dense), precision == "ieee")


def test_what_it_serves(monkeypatch):
    monkeypatch.setattr(compress.cuda_call, "alike", lambda tensors: len({t.dtype for t in tensors}) == 1)
    assert compress._fits(*example(2, 3, 5, 6, 4)) and not compress._fits(*(t.double() for t in example(2, 3, 5, 6, 4)))
    assert not compress._fits(*example(0, 3, 5, 6, 4)) and not compress._fits(*example(2, 1, 100, 6, 4))
    many = torch.randn(1).expand(1 << 20, 3, 2048)
    assert not compress._fits(many, many, torch.randn(4, 9))


def test_splits_keep_a_gpu_busy():
    assert splits_for(64, 13, 132) == 2 and splits_for(32, 64, 132) == 4  # xDeepFM's two layers at batch 256
    assert splits_for(1, 64, 132) > 10 and splits_for(512, 13, 132) == 1 and splits_for(1, 1, 132) == 1


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    infinite = example(1, 1, 1, 3, 4)
    infinite[0][0, 0, 1] = math.inf
    calls = [(infinite, 1), (with_bias(1, 7, 7, 9, 5), 2), (example(1, 4, 30, 6, 4), 1)]
    noticed = False
    for tensors, splits in calls:
        relu = len(tensors) == 4
        try:
            with awake(shim, MUTATIONS, name):
                given = found(shim, tensors, splits, relu=relu)
            close(given, tensors, relu=relu)
        except (ShimError, AssertionError):
            noticed = True
            break
    assert noticed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "H", "M", "N", "D"),
    [*SIZES, (256, 26, 26, 256, 16), (256, 128, 26, 128, 16), (1, 128, 26, 128, 16), (31, 39, 39, 100, 10)],
)
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_on_a_gpu(B, H, M, N, D, precision):
    x, y, weight, bias = with_bias(B, H, M, N, D, device="cuda")
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for tensors in ((x, y, weight), (strided, y, weight)):
        with torch.no_grad(), convolutions_in(precision):
            kernel = compress.loaded(*tensors)
            assert kernel is not None
            given = [op._on_cuda(*tensors) for _ in range(2)]
            ended = op.gpu_compressed_interaction(*tensors, bias, True)
        assert torch.equal(*given)
        close(given[0].double(), tensors, precision == "ieee")
        close(ended.double(), (*tensors, bias), precision == "ieee", relu=True)
