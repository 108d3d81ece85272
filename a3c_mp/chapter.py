"""A chapter as a program: from the command line to the end of its run."""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.run.learner import Learner, Setup
from a3c_mp.run.progress import RunState
from a3c_mp.run.script import exit_with


class Chapter:
    """A chapter of this machine: a learner, or several, and the actors that they spawn.

    The docstring of the module of `train` is its description; `presets` are settings by environment id. In a
    process of its own, `actor(channel, args)` makes an actor, which fills one slot at a call; in the process of each
    learner, `setup(args, rank)` makes nets, optimizer and slots, and `train(args, learner)` is the loop.
    """

    def __init__(
        self, args_class: type[Any], presets: Mapping[str, Any], actor: Callable[..., Any],
        train: Callable[..., None], setup: Callable[..., Setup],
    ):  # fmt: skip
        self.args_class, self.presets, self.actor, self.train, self.setup = args_class, presets, actor, train, setup

    def __call__(self) -> int:
        """Run the chapter with the settings of the command line; returns the exit code."""
        from a3c_mp.cli import parse_args  # here, as actors import the chapter and need neither flags nor folders
        from a3c_mp.run.run import Run

        description = sys.modules[self.train.__module__].__doc__ or ""
        args = parse_args(self.args_class, self.presets, description)
        setup = self.setup(args)
        with (
            Run(args, args.algorithm, setup.net, setup.optimizer, setup.saved, setup.make_policy) as run,
            self._learners(args, run) as group,
            Learner(args, run, setup, self.actor, group) as learner,
        ):
            self.train(args, learner)
        return run.exit_code

    def _learners(self, args: Any, run: RunState) -> AbstractContextManager[LearnerGroup]:
        if getattr(args, "num_learners", 1) == 1:
            return nullcontext(LearnerGroup())
        from a3c_mp.processes.learners import Learners

        return Learners(run, peer, self.actor, self.train, self.setup)

    def run_as_script(self) -> None:
        exit_with(self)


def peer(group: LearnerGroup, args: Any, steps: int, updates: int, *parts: Callable[..., Any]) -> None:
    """Entry point of learners 1, 2, ...: `parts` are the chapter's actor, train and setup."""
    actor, train, setup = parts
    run = RunState(args, group.rank, steps, updates)
    with Learner(args, run, setup(args, group.rank), actor, group) as learner:
        train(args, learner)
