"""Actors as threads of this process: a chapter's whole `main`, its learner and its actors, in a second."""

import queue
import threading
from contextlib import suppress

from a3c_mp.workers import Filled, Token


class Ended(Exception):
    """The learner wants no more."""


def run_quietly(target, *args):
    with suppress(Ended):
        target(*args)


class InlineLink:
    """Stands in for `Link`."""

    generation = 0

    def __init__(self, worker, start, results):
        self.worker, self.start, self.results, self.tokens = worker, start, results, queue.Queue()

    def take(self):
        token = self.tokens.get(timeout=60)
        if token is None:
            raise Ended
        return token

    def send(self, slot, payload):
        self.results.put(Filled(self.worker, slot, payload))

    def beat(self):
        pass

    def closing(self, resource):
        return resource


class InlineWorkers:
    """Stands in for `Workers`: the same calls, threads instead of processes, nobody supervised."""

    def __init__(self, target, num_workers, args, *, start, slots_per_worker, in_order, **_):
        self.in_order, self.slots_per_worker = in_order, slots_per_worker
        results = [queue.Queue() for _ in range(num_workers)] if in_order else [queue.Queue()] * num_workers
        self.links = [InlineLink(worker, start, results[worker]) for worker in range(num_workers)]
        self.threads = [
            threading.Thread(target=run_quietly, args=(target, link, *args), daemon=True) for link in self.links
        ]
        for slot in range(num_workers * slots_per_worker):
            self.release(slot, 0)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        for link in self.links:
            link.tokens.put(None)
        for thread in self.threads:
            thread.join(60)

    def filled(self, should_stop):
        turn = 0
        while not should_stop():
            yield self.links[turn].results.get(timeout=60)
            turn = (turn + 1) % len(self.links) if self.in_order else 0

    def release(self, slot, version):
        self.links[slot // self.slots_per_worker].tokens.put(Token(slot, version))
