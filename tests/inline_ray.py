"""Ray as threads of this process: what `a3c_mp.cluster` calls of it, so that a chapter runs in a second."""

import asyncio
import copy
import importlib.machinery
import inspect
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace


class RayError(Exception):
    """As `ray.exceptions.RayError`."""


class RayTaskError(RayError):
    """An exception in an actor, with its cause."""

    def __init__(self, cause):
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


RayActorError = type("RayActorError", (RayError,), {})
ActorUnavailableError = type("ActorUnavailableError", (RayActorError,), {})
ObjectLostError = type("ObjectLostError", (RayError,), {})
OutOfMemoryError = type("OutOfMemoryError", (RayError,), {})


class Reference(Future):
    """To the answer of an actor, or to an object."""

    def __deepcopy__(self, memo):
        return self


class Method:
    """A method of an actor: `actor.method.remote(...)`."""

    def __init__(self, actor, name, num_returns=1, concurrency_group=None):
        self.actor, self.name, self.num_returns, self.group = actor, name, num_returns, concurrency_group

    def options(self, **options):
        return Method(self.actor, self.name, **options)

    def remote(self, *args):
        answers = [Reference() for _ in range(self.num_returns)]
        thread = self.actor._thread if self.group is None else self.actor._control
        thread.submit(self.actor._answer, self.name, args, answers)
        return answers[0] if self.num_returns == 1 else answers


class Actor:
    """Runs the calls of an object on a thread of its own, those of a coroutine on an event loop."""

    def __init__(self, kind, args, max_restarts):
        self._kind, self._args, self._max_restarts = kind, copy.deepcopy(args), max_restarts
        self._actor_id = SimpleNamespace(hex=lambda: str(id(self)))
        self._thread, self._control = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._start()
        self.dead = False

    def _start(self):
        self._object = self._thread.submit(lambda: self._kind(*self._args))

    def __deepcopy__(self, memo):
        return self

    def __getattr__(self, name):
        return Method(self, name)

    def _answer(self, name, args, answers):
        try:
            if self.dead:
                raise RayActorError("it was killed")
            known = [arg.result() if isinstance(arg, Future) else arg for arg in args]
            found = getattr(self._object.result(), name)(*known)
            if inspect.iscoroutine(found):
                asyncio.run_coroutine_threadsafe(found, self._loop).add_done_callback(
                    lambda done: answers[0].set_result(done.result())
                )
                return
            for answer, value in zip(answers, found if len(answers) > 1 else [found], strict=True):
                answer.set_result(copy.deepcopy(value))
        except BaseException as error:
            for answer in answers:
                answer.set_exception(error if isinstance(error, RayError) else RayTaskError(error))


class InlineRay(ModuleType):
    """The module `ray`, for `sys.modules`."""

    def __init__(self):
        super().__init__("ray")
        self.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        self.started = []
        names = (RayError, RayTaskError, RayActorError, ActorUnavailableError, ObjectLostError, OutOfMemoryError)
        self.exceptions = SimpleNamespace(**{name.__name__: name for name in names})
        self._private = ModuleType("ray._private")
        per_node = {"actors": dict, "available_resources_per_node": lambda: {"node": {"CPU": 1.0}}}
        self._private.worker, self._private.utils = SimpleNamespace(), SimpleNamespace()
        self._private.state = SimpleNamespace(**per_node)
        loader = SimpleNamespace(instance=lambda: SimpleNamespace(reset_cache=lambda: None))
        config = SimpleNamespace(initialize=lambda text: None)
        self._raylet = SimpleNamespace(AuthenticationTokenLoader=loader, Config=config)

    def init(self, address, **options):
        self.options = options

    def shutdown(self):
        for actor in self.started:
            actor.dead = True
            actor._thread.shutdown(wait=False, cancel_futures=True)
            actor._loop.call_soon_threadsafe(actor._loop.stop)

    def remote(self, max_restarts, **options):
        def actor_class(kind):
            def start(*args):
                self.started.append(actor := Actor(kind, args, max_restarts))
                return actor

            self.selectors = []
            chosen = SimpleNamespace(remote=start)
            return SimpleNamespace(
                remote=start, options=lambda **more: (more and self.selectors.append(more)) or chosen
            )

        return actor_class

    def put(self, value):
        done = Reference()
        done.set_result(copy.deepcopy(value))
        return done

    def get(self, reference, timeout=None):
        return reference.result(timeout)

    def wait(self, references, num_returns=1, timeout=None):
        deadline = time.monotonic() + (timeout or 0)
        while True:
            done = [reference for reference in references if reference.done()]
            left = deadline - time.monotonic()
            if len(done) >= num_returns or left <= 0:
                return done[:num_returns], [ref for ref in references if ref not in done[:num_returns]]
            wait(references, left, "FIRST_COMPLETED" if num_returns == 1 else "ALL_COMPLETED")

    def cancel(self, reference, force=False):
        reference.cancel()

    def kill(self, actor, no_restart=True):
        """End an actor; one that Ray restarts only if it may not."""
        actor.dead = no_restart or not actor._max_restarts
        if not actor.dead:
            actor._thread.submit(bool).result()  # calls that wait are answered first
            actor._start()

    def nodes(self):
        return [{"NodeID": "node", "NodeManagerAddress": "127.0.0.1", "Alive": True, "Resources": {"CPU": 1.0}}]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "node")


class InlineNode:
    """Stands in for `Node`."""

    def __init__(self, options, settings):
        self.is_closed = False

    def wait_for_start(self):
        return "127.0.0.1:1"

    def close(self):
        self.is_closed = True


def install(patch):
    """Replace Ray until the end of a `monkeypatch.context()`."""
    ray = InlineRay()
    patch.setattr("os.nice", lambda increment: 0)  # of a thread here, and inherited by those that it starts
    patch.setattr("a3c_mp.cluster.session.Node", InlineNode)
    patch.setitem(sys.modules, "ray", ray)
    patch.setitem(sys.modules, "ray._private", ray._private)
    return ray
