"""Many threads, one model; and many calls, no growth."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.runtime.models import Tower, assert_same, optimize, tower_inputs

THREADS = 8


def test_eight_threads_race_to_the_first_call():
    model = Tower().eval()
    fast, recorder = optimize(model)
    start = threading.Barrier(THREADS)
    batches = [tower_inputs(n) for n in range(1, THREADS + 1)]
    doubles = [(dense.double().float(), ids) for dense, ids in batches]
    expected = [model(*inputs) for inputs in batches]

    def work(i):
        start.wait()
        return [fast(*(batches if k % 2 else doubles)[i]) for k in range(20)]

    with ThreadPoolExecutor(THREADS) as pool:
        for i, results in enumerate(pool.map(work, range(THREADS))):
            for result in results:
                assert_same(result, expected[i])
    assert recorder.captures == 1
    assert recorder.runs >= THREADS * 20 - THREADS  # += is not atomic; a capture is made once all the same


def test_threads_while_another_signature_is_captured():
    model = Tower().eval()
    fast, recorder = optimize(model)
    inputs = tower_inputs()
    expected = fast(*inputs)
    wide = (inputs[0], inputs[1].int())
    stop = threading.Event()
    wrong = []

    def serve():
        while not stop.is_set():
            out = fast(*inputs)
            if not torch.equal(out, expected):
                wrong.append(out)

    servers = [threading.Thread(target=serve) for _ in range(3)]
    for server in servers:
        server.start()
    assert_same(fast(*wide), expected)
    stop.set()
    for server in servers:
        server.join()
    assert not wrong
    assert recorder.captures == 2


def test_a_thousand_calls_keep_nothing():
    fast, _ = optimize(Tower().eval())

    def call(times):
        for n in range(times):
            fast(*tower_inputs(n % 7)).sum().backward()
        fast.zero_grad()
        gc.collect()
        return len(gc.get_objects()), sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    call(20)
    objects, tensors = call(20)
    more_objects, more_tensors = call(1000)
    assert more_tensors <= tensors
    assert more_objects - objects < 100
