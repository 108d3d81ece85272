"""Nodes: processes that run one function each, with messages between them, supervised by the process that started them.

Node 0 is the process that the user started. If another node dies, hangs or raises an exception, node 0 names and
replaces it; with node 0 all of them end.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from a3c_mp.errors import ConfigError, Terminated, WorkerError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import DONE, TERMINATED, run_supervised, start_child
from a3c_mp.processes.supervisor import CLOSE_SECONDS, Child, Supervisor, await_end
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.node import ALL_RUNS, REPORT_NAME, REPORT_RESULT, FirstNode, JoinedNode, Node
from a3c_mp.task.router import Hub, Spoke
from a3c_mp.task.wire import FINISH

MAX_WAITING = 512 * 2**20  # bytes to and from nodes of other machines that may wait while node 0 of a `runner` computes


@dataclass(frozen=True)
class Role:
    """What a node is called and does, and what its parent does for it."""

    name: str = "node"  # in messages and errors
    labels: tuple[str, ...] = ()  # besides "node.0", ...
    main: Callable[..., None] | None = None  # its process runs `main(node, *args)`, unless it is node 0: this one
    args: tuple[Any, ...] = ()
    flag: str = "n_parallel_workers"  # that says how many such nodes there are; they share a restart budget
    niceness: int = 0
    prepare: Callable[[], Any] = lambda: None  # makes `node.setup`; called before each start
    on_restart: Callable[[str], Any] = print  # gets what happened, before the node is replaced
    on_lost: Callable[[WorkerError], Any] | None = None  # as of `Child`


def supervise(
    roles: Sequence[Role], endpoints: Sequence[Endpoint], limits: Mapping[str, Any], log: logging.Logger | None = None
) -> Supervisor:
    """Make the supervisor of one process for each role; `limits` are those of `Supervisor`.

    It raises the ConfigError of a node that refuses to take part. With a `log`, where nodes join the task of another
    machine, one that loses its place there ends alone if there are others.
    """
    beats = shared_counters(len(roles) + 1)[:-1]  # there is no empty shared memory

    def launch(index: int) -> tuple[Any, connection.Connection]:
        role, (pipe, child_end) = roles[index], mp.Pipe(duplex=False)
        with child_end:  # the child has a copy; with this one closed, its death reads as an end of file
            node_args = endpoints[index], beats[index : index + 1], role.niceness, role.prepare()
            run_args, name = (role.main, role.args, node_args, child_end), role.name.replace(" ", "-")
            return start_child(run_node, run_args, name=name, daemon=True, group=True), pipe

    def on_message(index: int, report: tuple) -> None:
        child, (kind, *content) = supervisor.children[index], report
        if kind == REPORT_RESULT:
            child.record_result()
        elif kind == REPORT_NAME:
            [child.name] = content
            if log is not None:
                log.info(f"{child} has joined {endpoints[index].dials}")
        else:  # REPORT_REFUSAL
            refusal = ConfigError(*content)
            others = [other for other in supervisor.children if other is not child and not other.is_done]
            if log is None or not (child.had_result and others):
                raise refusal
            log.warning(f"{child} has lost its place and ends: {refusal}")

    children = [Child(r.name, partial(launch, n), r.flag, r.on_lost) for n, r in enumerate(roles)]
    supervisor = Supervisor(
        children, beats, on_message=on_message, on_restart=lambda index, text: roles[index].on_restart(text), **limits
    )
    return supervisor


def run_node(
    main: Callable[..., None], args: tuple, node_args: tuple[Endpoint, Tensor, int, Any], pipe: connection.Connection
) -> None:
    """Entry point of the process of a node besides node 0; its reports go through the pipe."""
    endpoint, beats, niceness, setup = node_args  # beats: int64 [1] in shared memory
    counts = beats.numpy()  # the same memory, faster
    torch.set_num_threads(1)
    os.nice(niceness)

    def beat() -> None:
        if TERMINATED:
            raise Terminated
        counts[0] += 1

    def body() -> None:
        with node.router:
            main(node, *args)
            pipe.send((DONE,))

    node = Node(Spoke(endpoint), setup, beat, lambda *report: pipe.send(report))
    run_supervised(body, pipe, close=node.close)


@contextmanager
def start_nodes(
    roles: Sequence[Role], *, limits: Mapping[str, Any], listen: str | None = None, log: logging.Logger | None = None,
    is_interrupted: Callable[[], bool] = lambda: False, **settings: Any,
) -> Iterator[FirstNode]:  # fmt: skip
    """Start nodes on this machine, of which this process is node 0; replace those that fail, and end all of them.

    Arguments are those of `supervise`, `Router` and `local_endpoints`; `roles` are those of nodes 0, 1, ...
    """
    labels = [role.labels for role in roles]
    with ExitStack() as stack:
        endpoints = [Endpoint(labels=labels[0])]
        if len(roles) > 1 or listen is not None:
            endpoints = local_endpoints(stack.enter_context(ipc_folder()), labels, listen, **settings)
        router = stack.enter_context(Hub(endpoints[0], log))
        supervisor = supervise(roles[1:], endpoints[1:], limits)
        node = FirstNode(router, supervisor, is_interrupted)
        stack.callback(node.close)
        stack.callback(supervisor.stop)
        supervisor.start()
        try:
            yield node
        finally:  # they end their iteration; those that take longer are terminated
            node.send(FINISH, ALL_RUNS)
            await_end(supervisor.processes, CLOSE_SECONDS, kill=False)


@contextmanager
def join_nodes(
    roles: Sequence[Role], router: Spoke, limits: Mapping[str, Any], log: logging.Logger | None = None
) -> Iterator[JoinedNode]:
    """Start further nodes of this machine in the task that `router` has joined, and wait until they, or the task, end.

    Each is a process with a connection of its own; arguments as of `supervise`. Raises ConfigError where the task
    refuses a node, WorkerError where it is killed, or a node here is given up.
    """
    endpoints = [replace(router.endpoint, labels=role.labels) for role in roles]
    supervisor = supervise(roles, endpoints, limits, log)
    node = JoinedNode(router, supervisor, print if log is None else log.info)
    with ExitStack() as stack:
        stack.callback(node.close)
        stack.callback(supervisor.stop)
        supervisor.start()
        yield node
        while not all(child.is_done for child in supervisor.children) and (router.peers or not node.finishing):
            node.wait()
        await_end(supervisor.processes, CLOSE_SECONDS, kill=False)


def runner(
    n_parallel_workers: int, *, labels: Sequence[str | Sequence[str]] = (), listen: str | None = None,
    attach_to: str | None = None, key_file: str | Path | None = None, max_restarts: int = 5,
    middleware_seconds: float = 1800.0,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function `run(main, *args)` that runs `main(node, *args)` in each of several processes.

    This process is one of them, node 0 or the first that joins; its result is that of `run`. Node 0 begins once all
    others that it has started are connected. The others import `main`: a script calls `run` below
    `if __name__ == "__main__"`.

    Args:
        labels: of each node, besides "node.0", ...: a label, or several.
        listen: tcp://HOST:PORT, where nodes of other runners may join node 0.
        attach_to: the address at which another runner's node 0 listens; all nodes of this runner join it.
        key_file: of the key that both need; node 0 makes it if it is missing.
        max_restarts: how often nodes that fail are replaced, all of them together.
        middleware_seconds: a node that has looked at no message for so long is replaced: the longest time of a
            middleware.

    Raises:
        ConfigError: of `run`, if settings are wrong, no node lets this one in, or a node refuses to take part.
        WorkerError: of `run`, if the restart budget is spent, or the node 0 that this one has joined is killed.
    """
    if n_parallel_workers < 1 or len(labels) > n_parallel_workers:
        why = f"there is at least one node, and one for each of {len(labels)} lists of labels"
        raise ConfigError("n_parallel_workers", n_parallel_workers, why, "raise it")
    if listen is not None and attach_to is not None:
        raise ConfigError("attach-to", attach_to, "a node that joins does not listen", "leave listen out")
    all_labels = [(own,) if isinstance(own, str) else tuple(own) for own in labels]
    all_labels += [()] * (n_parallel_workers - len(labels))
    limits = {"max_restarts": max_restarts, "hang_seconds": middleware_seconds, "hang_setting": "middleware_seconds"}
    key = None if key_file is None else Path(key_file)

    def run(main: Callable[..., Any], *args: Any) -> Any:
        roles = [Role(f"node {n}", own, _run_main, (main, *args)) for n, own in enumerate(all_labels)]
        if attach_to is not None:
            first = Endpoint(dials=attach_to, labels=roles[0].labels, key_file=key)
            with Spoke(first) as router, join_nodes(roles[1:], router, limits) as node:
                return main(node, *args)
        own: dict[str, Any] = {"key_file": key, "greeting": {"run": token_hex(8)}, "max_waiting": MAX_WAITING}
        with start_nodes(roles, limits=limits, listen=listen, **own) as node:
            while not (node.finishing or all(child.is_done or child.has_result for child in node.supervisor.children)):
                node.wait()
            return main(node, *args)

    return run


def _run_main(node: Node, main: Callable[..., Any], *args: Any) -> None:
    """Run `main` in a node besides the first one of its machine."""
    node.report(REPORT_NAME, node.name.replace(".", " "))  # that of one that joins is not known before
    node.report(REPORT_RESULT)  # its process can be started
    try:
        main(node, *args)
    except ConfigError as error:
        node.refuse(error)
