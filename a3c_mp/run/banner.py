"""The first lines of a run's log: spaces, net, rewards, schedules, and what a resumed run changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.build import OwnActorCritic
from a3c_mp.nets.obs_norm import note_on_inputs
from a3c_mp.run.preflight import FOUND
from a3c_mp.run.run_dir import as_recorded, changed_settings, settings_before


def first_lines(args: CommonArgs, net: nn.Module, folder: Path, steps: int) -> list[str]:
    """The lines that describe a run, for its log at the start.

    Args:
        args, net: of the run.
        folder: of the run, whose `config.json` has this start already.
        steps: agent steps of the run so far.
    """
    lines = [" \u00b7 ".join(part for part in (*env_parts(args), net_text(net), *settings_parts(args)) if part)]
    lines.append(end_text(args))
    if args.env_id in FOUND and (layout := FOUND[args.env_id].layout):
        lines.append(f"observations are flattened: {layout}")
    if note := note_on_inputs(net):
        lines.append(note)
    saved = settings_before(folder, 1)
    lines += [text] if (text := changes_text(as_recorded(args), saved)) else []
    lines += [note] if (note := note_on_schedule(args, saved, steps)) else []
    lines += budget_notes(args)
    if args.num_actors:  # else others join
        each = "with" if args.num_actors == 1 else "each with"
        environments = plural(args.num_envs, "environment")
        if args.explorers:
            environments += f", of which {args.explorers} explore{'s' if args.explorers == 1 else ''}"
            environments += " while there are no rewards" if vars(args)["explore_after"] else ""
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


def plural(number: int, noun: str) -> str:
    """`2 actors` or `1 actor`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def env_parts(args: CommonArgs) -> list[str]:
    """Shape of the observations, and action space."""
    if args.env_id not in FOUND:
        return []
    obs_space, action_space, _ = FOUND[args.env_id]
    return [f"obs {obs_space.shape}", " ".join(str(action_space).split())]


def net_text(net: nn.Module) -> str:
    """Layers and number of parameters of a net, such as `MLP 2x64 \u00b7 9,155 parameters`."""
    number = f"{sum(p.numel() for p in net.parameters()):,} parameters"
    if isinstance(net, OwnActorCritic):
        return f"{type(net.body).__name__} \u00b7 {number}"
    head = next((m for name, m in net.named_modules() if name.split(".")[-1] in ("policy", "actor", "advantage")), None)
    if head is None:
        return f"{type(net).__name__} \u00b7 {number}"
    torso = next((m for name, m in net.named_modules() if name.split(".")[-1] == "torso"), nn.Sequential())
    layers = [layer for part in (torso, head) for layer in part.modules() if isinstance(layer, nn.Linear)]
    convolutions = sum(isinstance(module, nn.Conv2d) for module in net.modules())
    parts = [f"{convolutions} convolutions"] if convolutions else ["MLP"]
    if sizes := [layer.out_features for layer in layers[:-1]]:
        alike = len(set(sizes)) == 1 and len(sizes) > 1
        parts.append(f"{len(sizes)}x{sizes[0]}" if alike else " ".join(map(str, sizes)))
    if (core := getattr(net, "core", None)) is not None:
        parts.append(f"LSTM {core.from_output.in_features}")
    return f"{' '.join(parts)} \u00b7 {number}"


def settings_parts(args: CommonArgs) -> list[str]:
    """What becomes of rewards, the learning rate and, where it is annealed, the entropy coefficient."""
    parts = []
    if hasattr(args, "reward_clip"):
        rewards = "rewards clipped to -1, 0, 1 (--no-reward-clip: as they are)" if args.reward_clip else "rewards"
        scale = getattr(args, "reward_scale", 1.0)
        parts.append(
            f"{rewards} x {scale:g}" if scale != 1.0 else rewards if args.reward_clip else "rewards as they are"
        )
    if hasattr(args, "learning_rate_end"):
        start, end = vars(args)["learning_rate"], args.learning_rate_end
        parts.append(schedule_text("lr", start, end, vars(args)["anneal_steps"], args.total_steps))
    elif hasattr(args, "learning_rate"):
        parts.append(f"lr {short(args.learning_rate)}")
    if (end := vars(args).get("entropy_coef_end")) is not None:
        start, own_end = vars(args)["entropy_coef"], vars(args)["entropy_steps"]
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


def changes_text(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The settings that a resumed run has changed: `changed: batch-size 32 (64 before)`; empty without any."""
    changed = changed_settings(now, before)
    changed.pop("--total-steps", None)  # `note_on_schedule` has it
    texts = [f"{flag.lstrip('-')} {plain(new)} ({plain(old)} before)" for flag, (old, new) in changed.items()]
    return f"changed: {', '.join(texts)}" if texts else ""


def plain(value: object) -> str:
    """A recorded setting as people write it: on, off, `8 8`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def note_on_schedule(args: CommonArgs, saved: Mapping[str, Any], steps: int) -> str:
    """What another --total-steps does to the schedules of a resumed run; empty if it is the same."""
    before = saved.get("total_steps", args.total_steps)
    if before == args.total_steps:
        return ""
    note = f"total-steps is {args.total_steps:,} now, {before:,} before"
    entropy_follows = vars(args).get("entropy_coef_end") is not None and not vars(args)["entropy_steps"]
    also = (
        "; the entropy coefficient may change at once, and reaches its end at the new total" if entropy_follows else ""
    )
    if hasattr(args, "learning_rate_end"):
        start, end = vars(args)["learning_rate"], args.learning_rate_end
        own_end, had_own_end = vars(args)["anneal_steps"], saved.get("anneal_steps")
        if own_end and own_end == had_own_end:
            return note + also  # the learning rate does not depend on it
        was = saved.get("learning_rate", start), saved.get("learning_rate_end", 0.0)
        old, new = linear(*was, steps, had_own_end or before), linear(start, end, steps, own_end or args.total_steps)
        at_once = f" goes from {short(old)} to {short(new)} at once, and" if short(old) != short(new) else ""
        when = f"after {own_end:,} steps" if own_end else "at the new end"
        note += f": the learning rate{at_once} goes to {short(end)} {when}"
    elif hasattr(args, "importance_exponent"):
        start = args.importance_exponent
        was = saved.get("importance_exponent", start)
        old, new = linear(was, 1.0, steps, before), linear(start, 1.0, steps, args.total_steps)
        note += f": the importance exponent goes from {old:.2f} to {new:.2f} at once, and to 1 at the new end"
    return note + also
