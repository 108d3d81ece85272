"""The first lines of a run's log: spaces, net, rewards, schedules, and what a resumed run changes."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from a3c_mp.config import CommonArgs, flag_name
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.obs_norm import note_on_inputs
from a3c_mp.run.preflight import FOUND
from a3c_mp.run.run_dir import as_recorded, changed_settings, starts_of

ENDS = ("total_steps", "max_seconds", "stop_return", "stop_eval_return")
"""settings that end a run"""


def first_lines(args: CommonArgs, net: nn.Module, folder: Path) -> list[str]:
    """The lines that describe a run, for its log at the start; its `config.json` has this start already."""
    number = f"{sum(p.numel() for p in net.parameters()):,} parameters"
    parts = [type(getattr(net, "body", net)).__name__, number, *settings_parts(args)]
    if found := FOUND.get(args.env_id):
        obs_space, action_space, layout = found
        parts = [f"obs {obs_space.shape}", " ".join(str(action_space).split()), *parts]
    lines = [" · ".join(parts)]
    if found and layout:
        lines.append(f"observations are flattened: {layout}")
    if note := note_on_inputs(net):
        lines.append(note)
    for start in starts_of(folder)[-2:-1]:  # the one before this
        changed = changed_settings(as_recorded(args), start["args"]).items()
        texts = [f"{flag} {new} ({old} before)" for flag, (old, new) in changed]
        lines += [f"changed: {', '.join(texts)}"] if texts else []
    ends = {name: getattr(args, name) for name in ENDS if getattr(args, name) is not None}
    lines.append(f"the run ends at {' or '.join(f'--{flag_name(name)} {value:,}' for name, value in ends.items())}")
    explorers = f", of which {args.explorers} explore" if args.explorers else ""
    lines.append(f"{args.actor_name}s: {args.num_actors}, with {args.num_envs} environments each{explorers}")
    return lines


def settings_parts(args: CommonArgs) -> list[str]:
    """What becomes of rewards, the learning rate and, where it is annealed, the entropy coefficient."""
    settings, parts = vars(args), list[str]()  # not every chapter has all of them
    if "reward_clip" in settings:
        changes = ["clipped to -1, 0, 1 (--no-reward-clip: as they are)"] if settings["reward_clip"] else []
        changes += [f"x {settings['reward_scale']:g}"] if settings["reward_scale"] != 1.0 else []
        parts.append(f"rewards {' '.join(changes) or 'as they are'}")
    if hasattr(args, "learning_rates"):
        start, end = args.learning_rates
        parts.append(schedule_text("lr", start, end, settings["anneal_steps"], args.total_steps))
    elif "learning_rate" in settings:
        parts.append(f"lr {settings['learning_rate']:g}")
    if (end := settings.get("entropy_coef_end")) is not None:
        start, own_end = settings["entropy_coef"], settings["entropy_steps"]
        parts.append(schedule_text("entropy", start, end, own_end, args.total_steps))
    return parts


def schedule_text(name: str, start: float, end: float, own_end: int, total: int) -> str:
    """What a run of `total` steps anneals: `lr 0.0005 -> 0 after 800,000 steps`; with `own_end` 0, over the run."""
    text = f"{name} {start:g} -> {linear(start, end, total, own_end or total):.4g}"
    return f"{text} after {own_end:,} steps" if 0 < own_end < total else text
