"""The first lines of a run's log: spaces, net, rewards, schedules, and what a resumed run changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.obs_norm import note_on_inputs
from a3c_mp.nets.own import OwnActorCritic
from a3c_mp.run.preflight import FOUND
from a3c_mp.run.run_dir import as_recorded, changed_settings, settings_before


def first_lines(args: CommonArgs, net: nn.Module, folder: Path) -> list[str]:
    """The lines that describe a run, for its log at the start.

    Args:
        args, net: of the run.
        folder: of the run, whose `config.json` has this start already.
    """
    parts = [net_text(net), *settings_parts(args)]
    found = FOUND.get(args.env_id)
    if found:
        parts = [f"obs {found.obs_space.shape}", " ".join(str(found.action_space).split()), *parts]
    lines = [" · ".join(parts), end_text(args)]
    if found and found.layout:
        lines.append(f"observations are flattened: {found.layout}")
    if note := note_on_inputs(net):
        lines.append(note)
    if changed := changed_settings(as_recorded(args), settings_before(folder, 1)):
        texts = [f"{flag.lstrip('-')} {plain(new)} ({plain(old)} before)" for flag, (old, new) in changed.items()]
        lines.append(f"changed: {', '.join(texts)}")
    lines += budget_notes(args)
    if args.num_actors:  # else others join
        explorers = f", of which {args.explorers} explore{'s' if args.explorers == 1 else ''}" if args.explorers else ""
        explorers += " while there are no rewards" if explorers and vars(args)["explore_after"] else ""
        each = "with" if args.num_actors == 1 else "each with"
        environments = f"{plural(args.num_envs, 'environment')}{explorers}"
        lines.append(f"starting {plural(args.num_actors, args.actor_name)}, {each} {environments}")
    return lines


def budget_notes(args: CommonArgs) -> list[str]:
    """Notes on a budget that may end before the first gradient step or evaluation."""
    notes = []
    starts = getattr(args, "learning_starts", 0) if args.chapter != "population" else 0  # a generation runs whole
    if starts >= args.total_steps:
        notes.append(f"the run may end before the first gradient step: --learning-starts is {starts:,}")
    if args.eval_every > args.total_steps:
        notes.append(f"the run may end before the first evaluation: --eval-every is {args.eval_every:,}")
    return notes


def end_text(args: CommonArgs) -> str:
    """When the run ends: `until the mean return is 475, at most 1,000,000 steps`."""
    by_evaluation = args.stop_eval_return if args.training_goal == args.stop_return else args.stop_return
    goals = [f"the mean return is {args.training_goal:g}"] if args.training_goal is not None else []
    goals += [f"an evaluation returns {by_evaluation:g}"] if by_evaluation is not None else []
    limits = [f"{args.total_steps:,} steps"]
    limits += [f"{args.max_seconds:g} s"] if args.max_seconds is not None else []
    if goals:
        return f"until {' or '.join(goals)}, at most {' or '.join(limits)}"
    return f"{' or '.join(limits)}, without a goal (--stop-return)"


def net_text(net: nn.Module) -> str:
    """Layers and number of parameters of a net, such as `MLP 2x64 · 9,155 parameters`."""
    number = f"{sum(p.numel() for p in net.parameters()):,} parameters"
    head = next((m for name, m in net.named_modules() if name.split(".")[-1] in ("policy", "actor", "advantage")), None)
    if isinstance(net, OwnActorCritic) or head is None:
        return f"{type(net.body if isinstance(net, OwnActorCritic) else net).__name__} · {number}"
    torso = next((m for name, m in net.named_modules() if name.split(".")[-1] == "torso"), nn.Sequential())
    layers = [layer for part in (torso, head) for layer in part.modules() if isinstance(layer, nn.Linear)]
    convolutions = sum(isinstance(module, nn.Conv2d) for module in net.modules())
    parts = [f"{convolutions} convolutions"] if convolutions else ["MLP"]
    if sizes := [layer.out_features for layer in layers[:-1]]:
        alike = len(set(sizes)) == 1 and len(sizes) > 1
        parts.append(f"{len(sizes)}x{sizes[0]}" if alike else " ".join(map(str, sizes)))
    if (core := getattr(net, "core", None)) is not None:
        parts.append(f"LSTM {core.from_output.in_features}")
    return f"{' '.join(parts)} · {number}"


def settings_parts(args: CommonArgs) -> list[str]:
    """What becomes of rewards, the learning rate and, where it is annealed, the entropy coefficient."""
    settings, parts = vars(args), list[str]()  # not every chapter has them
    if "reward_clip" in settings:
        rewards = (
            "rewards clipped to -1, 0, 1 (--no-reward-clip: as they are)" if settings["reward_clip"] else "rewards"
        )
        scale = settings["reward_scale"]
        as_they_are = " as they are" if not settings["reward_clip"] else ""
        parts.append(f"{rewards} x {scale:g}" if scale != 1.0 else f"{rewards}{as_they_are}")
    if hasattr(args, "learning_rates"):
        start, end = args.learning_rates
        parts.append(schedule_text("lr", start, end, settings["anneal_steps"], args.total_steps))
    elif "learning_rate" in settings:
        parts.append(f"lr {short(settings['learning_rate'])}")
    if (end := settings.get("entropy_coef_end")) is not None:
        start, own_end = settings["entropy_coef"], settings["entropy_steps"]
        parts.append(schedule_text("entropy", start, end, own_end, args.total_steps))
    return parts


def schedule_text(name: str, start: float, end: float, own_end: int, total: int) -> str:
    """What a run of `total` steps anneals: `lr 5e-4 -> 1e-4 after 800,000 steps`; with `own_end` 0, over the run."""
    text = f"{name} {short(start)} -> {short(linear(start, end, total, own_end or total))}"
    return f"{text} after {own_end:,} steps" if 0 < own_end < total else text


def short(number: float) -> str:
    """5e-4 for 0.0005."""
    number, small = float(f"{number:.3e}"), 0 < abs(number) < 1e-2
    return np.format_float_scientific(number, precision=3, trim="-", exp_digits=1) if small else f"{number:g}"


def plain(value: object) -> str:
    """A recorded setting as people write it: on, off, `8 8`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def plural(number: int, noun: str) -> str:
    """`2 actors` or `1 actor`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
