"""Inputs into static memory, through the shim and on a GPU: what is copied, what fills the rest."""

from __future__ import annotations

import ctypes
import random
import struct
from math import prod

import pytest
import torch

from fxopt.kernels.stage.op import (
    KERNEL,
    ONES,
    REPEAT,
    Fixed,
    Inputs,
    Room,
    Stage,
    Targets,
    _places,
    _slots,
    _Stage,
    pointers,
)
from tests.cuda.shim_library import GUARD, compile_shim

POISON = 0xC7  # not what fills the rest of ids


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = ctypes.CDLL(str(compile_shim(tmp_path_factory.mktemp("stage"), KERNEL.source)))
    built.fxopt_stage.restype = built.fxopt_deliver.restype = ctypes.c_bool
    return built


def staged(library, tensors, rooms, outputs=(), targets=None):
    """The static tensors after one call, as op.Stage makes them on a device; `outputs` go to `targets`."""
    targets = targets or Targets()
    table = torch.full((2 * (1 + len(outputs)) * 8 + 2 * GUARD,), POISON, dtype=torch.uint8)
    counts = torch.full((len(rooms) * 8 + 2 * GUARD,), POISON, dtype=torch.uint8)
    offsets, size = _places(rooms)
    memory = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8)
    base = memory.data_ptr() + GUARD
    here = [k for k, room in enumerate(rooms) if not room.on_host]
    there = [k for k, room in enumerate(rooms) if room.on_host]
    packed_bytes = max((offsets[k] + rooms[k].row_bytes * rooms[k].capacity for k in there), default=0)
    pinned = torch.full((max(1, packed_bytes),), POISON, dtype=torch.uint8)
    slots = ctypes.create_string_buffer(_slots(rooms, here, offsets, base))
    packed = ctypes.create_string_buffer(_slots(rooms, there, offsets, pinned.data_ptr()))
    items = [(s, p) for s, k in enumerate(here) for p in range(-(-rooms[k].row_bytes * rooms[k].capacity // 4096))]
    parts = ctypes.create_string_buffer(struct.pack(f"<{2 * len(items)}i", *(x for item in items for x in item)))
    address = ctypes.addressof
    stage = _Stage(
        address(slots), address(parts), len(items), len(rooms), address(packed), pinned.data_ptr(), base, packed_bytes,
        len(there), len(outputs), table.data_ptr() + GUARD, counts.data_ptr() + GUARD,
    )  # fmt: skip
    words = torch.zeros(2 * len(rooms), dtype=torch.int64)
    assert pointers().describe(tensors, words.data_ptr()) == -1
    named = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
    for at, size in named:
        if size:
            library.shim_name(ctypes.c_void_p(at), ctypes.c_size_t(size))
    text = ctypes.create_string_buffer(256)
    at = ctypes.c_void_p(targets.at)
    assert library.fxopt_stage(ctypes.byref(stage), ctypes.c_void_p(words.data_ptr()), at, None, text), text.value
    for at, _ in named:
        library.shim_forget(ctypes.c_void_p(at))
    library.shim_problem(text)
    assert text.value == b""
    inside = memory[GUARD:-GUARD]
    given = torch.frombuffer((ctypes.c_int64 * (2 + 2 * len(outputs))).from_address(targets.at), dtype=torch.int64)
    assert torch.equal(table[GUARD:-GUARD].view(torch.int64), given)
    assert counts[GUARD:-GUARD].view(torch.int64).tolist() == [len(t) if t.dim() else 1 for t in tensors]
    for written in (table, counts):
        assert (written[:GUARD] == POISON).all() and (written[-GUARD:] == POISON).all()
    if outputs:
        deliver(library, stage, outputs)
    used = torch.zeros_like(inside, dtype=torch.bool)
    found = []
    for at, room in zip(offsets, rooms, strict=True):
        used[at : at + room.row_bytes * room.capacity] = True
        found.append(inside[at : at + room.row_bytes * room.capacity].clone().view(room.dtype).view(room.shape))
    assert (inside[~used][packed_bytes:] == POISON).all() and (memory[:GUARD] == POISON).all()
    return found


def deliver(library, stage, outputs):
    addresses = (ctypes.c_void_p * len(outputs))(*(x.data_ptr() for x in outputs))
    most, text = max(x.numel() * x.itemsize for x in outputs), ctypes.create_string_buffer(256)
    assert library.fxopt_deliver(ctypes.byref(stage), addresses, ctypes.c_int64(most), None, text), text.value
    library.shim_problem(text)
    assert text.value == b""


def results(seed, device="cpu"):
    """What a graph may return, some of it not at an address that is a multiple of 16; and rows of each a row."""
    rng, outputs = random.Random(seed), []
    rows = [rng.choice((0, 1, 3)) for _ in range(rng.choice((1, 2, 7)))]
    for times in rows:
        shape = (8 * times, *rng.choice(((), (1,), (5,), (64, 33)))) if times else rng.choice(((), (3,), (2, 500)))
        dtype = rng.choice((torch.float32, torch.int64, torch.uint8, torch.float16))
        memory = torch.randint(0, 100, (prod(shape) + 1,)).to(dtype).to(device)
        outputs.append(memory[rng.choice((0, 1)) :][: prod(shape)].view(shape))
    return outputs, rows


@pytest.mark.parametrize("seed", range(12))
def test_outputs_go_where_the_call_says(library, seed):
    outputs, rows = results(seed)
    targets, (tensors, rooms) = Targets(outputs, rows), example(seed)
    for batch in (8, 5, 1, 0):
        targets.count(batch)
        fresh = targets.fresh(batch)
        assert_arrived(staged(library, tensors, rooms, outputs, targets), tensors, rooms)
        assert_delivered(fresh, outputs, rows, batch)


def assert_delivered(fresh, outputs, rows, batch):
    for new, whole, times in zip(fresh, outputs, rows, strict=True):
        expected = whole[: batch * times] if times else whole
        assert new.dtype == whole.dtype and torch.equal(new, expected)


def padded(tensor, room, tensors):
    missing = room.capacity - tensor.shape[0]
    if room.fill == REPEAT:
        rest = tensor[-1:].expand(missing, *tensor.shape[1:])
    elif room.fill == ONES:
        rest = (
            torch.full((missing * room.row_bytes,), 0xFF, dtype=torch.uint8)
            .view(room.dtype)
            .view(missing, *room.shape[1:])
        )
    else:
        rest = torch.full((missing,), tensors[room.fill].shape[0], dtype=room.dtype)
    return torch.cat([tensor, rest])


def example(seed):
    """Random inputs in other layouts, and their rooms."""
    rng, tensors, rooms = random.Random(seed), [], []
    for _ in range(12):
        rows, shape = rng.choice((1, 3, 40, 700)), rng.choice(((), (2,), (5,), (16,), (3, 4)))
        dtype = rng.choice((torch.float32, torch.int64, torch.int32, torch.float16, torch.uint8))
        tensor = torch.randint(0, 100, (2 * rows, *shape)).to(dtype)
        tensors.append(rng.choice((lambda t: t[::2], lambda t: t[: len(t) // 2], lambda t: t[len(t) // 2 :]))(tensor))
        room = Room((rows + rng.choice((0, 1, 37)), *shape), dtype, rng.random() < 0.4, rng.choice((REPEAT, ONES)))
        rooms.append(room)
    for dtype in (torch.int64, torch.int32):
        tensors.append(torch.arange(9, dtype=dtype))
        rooms.append(Room((12,), dtype, rng.random() < 0.5, 2))
    return tensors, rooms


def assert_arrived(found, tensors, rooms):
    for one, tensor, room in zip(found, tensors, rooms, strict=True):
        expected = padded(tensor, room, tensors)
        assert torch.equal(one.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), room


@pytest.mark.parametrize("seed", range(12))
def test_everything_arrives_and_the_rest_is_filled(library, seed):
    tensors, rooms = example(seed)
    assert_arrived(staged(library, tensors, rooms), tensors, rooms)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_on_a_gpu(seed):
    tensors, rooms = example(seed)
    stage, inputs = Stage(rooms, torch.device("cuda")), Inputs(len(rooms))
    outputs, rows = results(seed, "cuda")
    targets, graph = Targets(outputs, rows), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert stage.deliver(outputs, torch.cuda.current_stream().cuda_stream)
    for number in range(6):  # more than there are buffers for what comes from the host
        for room, memory in zip(rooms, stage.tensors, strict=True):
            memory.view(torch.uint8).fill_(POISON) if room.shape else memory.zero_()
        given = [t if room.on_host else as_it_lies(t) for t, room in zip(tensors, rooms, strict=True)]
        kept, batch = inputs.read(given), 8 - number
        targets.count(batch)
        fresh = targets.fresh(batch)
        stage.fill(inputs, targets, torch.cuda.current_stream().cuda_stream)
        graph.replay()
        del kept
        assert_delivered(fresh, outputs, rows, batch)
        assert stage.real_rows.item() == batch
        assert_arrived([one.cpu() for one in stage.tensors], tensors, rooms)
        tensors = [t.flip(0) for t in tensors[:-2]] + tensors[-2:]


def as_it_lies(tensor):
    """On the GPU, behind the same strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return moved.copy_(tensor)


def test_no_rows_and_scalars(library):
    tensors = [torch.zeros(0, dtype=torch.int64), torch.tensor(3.5)]
    rooms = [Room((4,), torch.int64, False, ONES), Room((), torch.float32, False, REPEAT)]
    ids, number = staged(library, tensors, rooms)
    assert ids.tolist() == [-1] * 4 and number.item() == 3.5


def test_wild_tensors_are_named():
    words = torch.zeros(4, dtype=torch.int64)
    assert pointers().describe([torch.zeros(3, 4), torch.zeros(3, 4).t()], words.data_ptr()) == 1
    assert pointers().describe([torch.zeros(3, 4).t()[:, :1]], words.data_ptr()) == -1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "data", torch.zeros(3, 3)),
        lambda x: x.t_(),
        lambda x: setattr(x, "data", x.data.t()),
        lambda x: setattr(x, "data", x.data[:2]),
    ],
)
def test_moved_tensors_are_seen(change):
    tensors = [torch.zeros(4), torch.zeros(3, 3)]
    fixed = Fixed(tensors)
    tensors[1].fill_(1)
    assert fixed.holds(tensors)
    change(tensors[1])
    assert not fixed.holds(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_numbers_on_the_cpu_are_known_by_value(dtype):
    number = torch.tensor(0, dtype=dtype)
    fixed = Fixed([number])
    assert fixed.holds([number])
    number.fill_(1)
    assert not fixed.holds([number])


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda x: x.conj().imag])
def test_what_is_only_marked_is_computed_before_it_is_copied(view):
    lazy = view(torch.randn(4, dtype=torch.complex64))
    inputs = Inputs(1)
    (tame,) = inputs.read([lazy])
    assert not tame.is_conj() and not tame.is_neg() and torch.equal(tame, lazy)
    assert not Fixed([lazy]).holds([lazy])


def test_a_tensor_of_more_rows_than_can_be_described_is_told():
    assert Inputs(1).read([torch.empty(1, dtype=torch.uint8).expand(2**31)]) is None


def test_nothing_is_as_it_was():
    assert Fixed([]).holds([]) and Fixed([]).holds(()) and Inputs(0).read([]) == []
