"""A server of one model: threads that answer whatever requests wait, as one batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

Request = tuple[Tensor, ...]  # the model's inputs, each with its rows on dim 0


class _Waiting(NamedTuple):
    request: Request
    answer: Future


class Server:
    """Answers requests with `model`, up to `most` rows in one call; no request waits for others to come.

    Args:
        model: from the tensors of a request to one tensor, row by row.
    """

    def __init__(self, model: Callable[..., Tensor], threads: int = 1, most: int = 256) -> None:
        self.model = model
        self._most = most
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request) -> Future:
        """The model's answer to one request. Its errors are those of the model for this request alone."""
        answer: Future = Future()
        self._waiting.put(_Waiting(request, answer))
        return answer

    def close(self) -> None:
        """Answers what waits, and ends."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        over = False
        while not over and (first := self._waiting.get()) is not None:
            batch, rows = [first], len(first.request[0])
            while rows < self._most and not self._waiting.empty():
                try:
                    following = self._waiting.get_nowait()
                except queue.Empty:  # another thread was faster
                    break
                if following is None:
                    over = True
                    break
                batch.append(following)
                rows += len(following.request[0])
            self._answer(batch)

    @torch.inference_mode()
    def _answer(self, batch: Sequence[_Waiting]) -> None:
        try:
            joined = [torch.cat(column) for column in zip(*(each.request for each in batch), strict=True)]
            answers = self.model(*joined).split([len(each.request[0]) for each in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            for each in batch:
                self._answer([each])
            return
        for each, answer in zip(batch, answers, strict=True):
            each.answer.set_result(answer)
