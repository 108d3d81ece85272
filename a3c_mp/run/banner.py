"""The first lines of a run's log (spaces, net, rewards, schedules, changes) and the last (why it ended, what next)."""

import logging
import os
import re
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from a3c_mp.config import CommonArgs, flag_name
from a3c_mp.errors import A3CError, ConfigError, describe
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.build import HIDDEN, SHARED_UNITS
from a3c_mp.nets.obs_norm import note_on_inputs
from a3c_mp.processes.slots import cores
from a3c_mp.run.evaluation import evaluation_seed
from a3c_mp.run.mean_return import MIN_EPISODES, ReturnWindow, short_return
from a3c_mp.run.preflight import FOUND, TRIALS
from a3c_mp.wrappers import ActionScaling

ENDS = ("total_steps", "max_seconds", "stop_return", "stop_eval_return")  # settings that end a run
ENDINGS = {"total_steps": "--total-steps reached", "max_seconds": "--max-seconds reached"}
"""reason why a run has ended -> its name in the last line; others stay as they are"""
SLOW_SECONDS = 10.0  # until the first results of actors, beyond which the log says so


def first_lines(args: CommonArgs, net: nn.Module, steps: int = 0) -> list[str]:
    """The lines that describe a run, for its log at the start, after `steps`."""
    net = getattr(net, "net", net)  # a population's, of its fittest member
    number = f"{sum(p.numel() for p in net.parameters()):,} parameters"
    parts = [net_name(vars(args), net), number, *settings_parts(args, steps)]
    if found := FOUND.get(args.env_id):
        obs_space, action_space, layout = found
        actions = f"{action_space} {ActionScaling(action_space)}"
        parts = [f"obs {obs_space.shape}", " ".join(actions.split()), *parts]
    notes = [f"observations: {layout}" if found and layout else "", note_on_inputs(net)]
    if (trial := TRIALS.get(args.env_id)) and trial.lost:
        why = "changed in the first steps by less than float32 can tell; subtract its offset in a wrapper (--wrapper)"
        notes.append(f"observations: number {trial.lost} {why}")
    lines = [" · ".join(parts), *filter(None, notes)]
    ends = {name: getattr(args, name) for name in ENDS if getattr(args, name) is not None}
    goal = f"the run ends at {' or '.join(f'--{flag_name(name)} {value:,}' for name, value in ends.items())}"
    if args.games_explore and "stop_return" in ends:
        offer = "; --eval-every N --stop-eval-return R --stop-return none: of greedy games"
        offer = offer if args.stop_eval_return is None else ""
        goal += f" (the mean return of games with exploration{offer})"
    lines.append(goal if len(ends) > 1 else f"{goal}; Ctrl-C ends it sooner and keeps what was learned")
    explorers = f", of which {args.explorers or 'none'} explore" if getattr(args, "explore_envs", 0) else ""
    cores = note_on_cores(args)
    if later := getattr(args, "max_actors", args.num_actors) - args.num_actors:
        cores += f"; at most {later} more that join"
    lines.append(f"{args.actor_name}s: {args.num_actors}, with {args.num_envs} environments each{explorers}{cores}")
    if note := note_on_speed(args):
        lines.append(note)
    if args.eval_every:
        flags = f"--episodes {args.eval_episodes} --seed {evaluation_seed(args)}"
        if args.eval_max_steps != CommonArgs.eval_max_steps:
            flags += f" --max-steps {args.eval_max_steps}"
        if args.eval_envs != CommonArgs.eval_envs:
            flags += f" --num-envs {args.eval_envs}"
        games = f"{args.eval_episodes} greedy games, as play.py {flags} plays them"
        lines.append(f"evaluation every {args.eval_every:,} steps: {games}")
    return lines


def note_on_speed(args: CommonArgs) -> str:
    """How fast a slow environment is, and when the first results of its actors are due; "" if that is soon."""
    settings, actors = vars(args), max(args.local_actors, 1)
    if settings.get("address") or settings.get("listen"):  # actors are on other machines
        return ""
    length: Any = getattr(args, "rounds", 0) or settings.get("unroll_length") or settings.get("block_length", 0)
    at_once = 1 if settings.get("standalone") else min(actors, cores())
    trial = TRIALS.get(args.env_id)
    rate = at_once / max(trial.step_seconds if trial else 0.0, 1e-9)
    if (seconds := actors * args.num_envs * length / rate) < SLOW_SECONDS:
        return ""
    what = f"the environment takes about {rate:,.0f} steps a second, {args.actor_name}s {at_once} at a time"
    each = f"{args.num_envs * length:,} steps of each {args.actor_name}"
    return f"{what}: waiting for the first {each}, about {seconds:.0f} s"


def note_on_cores(args: CommonArgs) -> str:
    """Which --num-actors would use the cores of this machine, if most of them have nothing to do."""
    learners, number = args.local_learners, cores()
    at_most = (number - learners) // learners * learners
    if not args.local_actors or vars(args).get("standalone") or at_most < 2 * args.local_actors:
        return ""
    more = f"--{args.actors_flag} {at_most} would use them"  # on CPUs the learner takes in less, and actors may wait
    return f"; of {number} cores most are idle, {more if args.cuda else f'a higher --{args.actors_flag} may use them'}"


def net_name(settings: Mapping[str, Any], net: Any) -> str:
    """What a net is called: `MLP 64 64`, `nature net`, or the class of one without such settings."""
    if not {"net", "hidden"} <= settings.keys() or hasattr(net, "body") or not isinstance(net, ActorCritic):
        return type(getattr(net, "body", net)).__name__
    hidden = (SHARED_UNITS,) if net.lstm_size else settings["hidden"] or HIDDEN
    name = f"{settings['net']} net" if net.norm.has_images else f"MLP {' '.join(map(str, hidden))}"
    return f"{name}, LSTM" if net.lstm_size else name


def settings_parts(args: CommonArgs, done: int = 0) -> list[str]:
    """What becomes of rewards, and of learning rate and entropy coefficient in the steps of this run."""
    settings, parts = vars(args), list[str]()  # not every chapter has all of them
    if "reward_clip" in settings:
        changes = ["clipped to -1, 0, 1 (--no-reward-clip: as they are)"] if settings["reward_clip"] else []
        if settings["reward_scale"] != 1.0:
            running = settings["reward_scale"] is None
            changes.append("by the deviation of returns" if running else f"x {settings['reward_scale']:g}")
        parts.append(f"rewards {' '.join(changes) or 'as they are'}")
    if "learning_rate" in settings and settings.get("learning_rate_end") is None:
        parts.append(f"lr {settings['learning_rate']:g}")
    for name, field, during in ("lr", "learning_rate", "anneal_steps"), ("entropy", "entropy_coef", "entropy_steps"):
        if (end := settings.get(f"{field}_end")) is not None and field in settings:
            start, steps = settings[field], settings.get(during) or args.total_steps
            now = f", {linear(start, end, done, steps):.4g} now" if done else ""
            after = f" after {steps:,} steps" if steps < args.total_steps else ""
            parts.append(f"{name} {start:g} -> {linear(start, end, args.total_steps, steps):.4g}{after}{now}")
    return parts


def end_lines(run: Any, error: BaseException | None) -> Iterator[tuple[int, str]]:
    """Yield (level, line) of the last lines of a run that an error ended, if one did."""
    if error is not None and run.failed and not isinstance(error, ConfigError):  # which `exit_with` prints
        yield logging.ERROR, f"error: {describe_error(error)}"
    if run.unsaved:
        yield logging.ERROR, f"error: the state at {run.steps:,} steps was not saved; see the warning above"
    if counts := run.progress.counts:
        yield logging.INFO, f"in total: {', '.join(counts)}"
    newest = run.checkpointer.newest
    is_to_go_on = run.steps and (run.exit_code or run.exit_reason == "max_seconds")
    if is_to_go_on and newest is not None and all(map(os.path.exists, (newest, run.folder / "config.json"))):
        level = logging.ERROR if run.exit_code == 1 else logging.INFO
        yield level, f"the last checkpoint is {newest}; continue with {resume_command(run.folder)}"
    progress = run.progress
    figures = [mean_return(progress.window)] if progress.window.returns else []
    figures = figures if run.metrics.headline is None else run.metrics.headline()
    figures += [f"{run.steps:,} steps", f"{run.metrics.clock.sps():,.0f} sps; in {run.folder}"]
    reason = run.exit_reason or "ended"
    reason = "failed" if reason.startswith("error: ") else reason  # its text is a line of its own
    if reason == "solved" and progress.evals.is_solved:
        best = f"return {short_return(progress.evals.best_mean)}, weights of {progress.evals.best['steps']:,} steps"
        reason = f"solved by evaluation ({best})"
    if not run.updates and run.exit_reason in ENDINGS:
        yield logging.WARNING, "nothing was learned, there was no update: raise --total-steps or --max-seconds"
    after = timedelta(seconds=int(progress.wall_seconds))
    yield logging.INFO, f"{ENDINGS.get(reason, reason)} after {after}: {', '.join(figures)}"


def mean_return(window: ReturnWindow) -> str:
    """The mean return, and that of the first games once there are twice as many."""
    text = f"mean return {short_return(window.mean)}"
    if (num := min(len(window.first), window.episodes // 2)) < MIN_EPISODES:
        return text
    return f"{text} (first {num} games: {short_return(statistics.fmean(window.first[:num]))})"


def resume_command(folder: Path) -> str:
    """The command that goes on with the run in a folder; for one of several ranks, what to add to their launcher's."""
    script, flag = sys.argv[0], f"--resume {shlex.quote(str(folder))}"
    if "WORLD_SIZE" in os.environ:
        return flag
    python = shlex.quote((sys.orig_argv or ["python"])[0])  # as it was typed
    return f"{python} {shlex.quote(script)} {flag}" if script.endswith(".py") else f"{script} {flag}"


def describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, A3CError) and str(error) else describe(error)


def error_summary(text: str) -> str:
    """First line of an error's text, for `exit_reason`; if a worker's traceback follows, with what was raised."""
    first, *rest = text.splitlines()
    frames = [number for number, line in enumerate(rest) if line.startswith('  File "')]
    raised = [line for line in rest[frames[-1] + 1 :] if not line.startswith(" ")][:1] if frames else []
    if raised and (place := re.match(r'  File "([^"]*)", line (\d+)', rest[frames[-1]])):
        raised = [f"{raised[0]} ({Path(place[1]).name}:{place[2]})"]
    return " ".join([first if first.endswith(":") or not raised else f"{first}:", *raised])
