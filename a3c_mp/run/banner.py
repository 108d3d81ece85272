"""The first lines of a run's log: spaces, net, rewards, schedules, and what a resumed run changes."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.obs_norm import note_on_inputs
from a3c_mp.nets.own import OwnActorCritic
from a3c_mp.run.preflight import FOUND
from a3c_mp.run.run_dir import as_recorded, changed_settings, starts_of


def first_lines(args: CommonArgs, net: nn.Module, folder: Path) -> list[str]:
    """The lines that describe a run, for its log at the start; its `config.json` has this start already."""
    parts = [net_text(net), *settings_parts(args)]
    if found := FOUND.get(args.env_id):
        parts = [f"obs {found.obs_space.shape}", " ".join(str(found.action_space).split()), *parts]
    lines = [" · ".join(parts), end_text(args)]
    if found and found.layout:
        lines.append(f"observations are flattened: {found.layout}")
    if note := note_on_inputs(net):
        lines.append(note)
    for start in starts_of(folder)[-2:-1]:  # the one before this
        changed = changed_settings(as_recorded(args), start["args"]).items()
        texts = [f"{flag} {new} ({old} before)" for flag, (old, new) in changed]
        lines += [f"changed: {', '.join(texts)}"] if texts else []
    explorers = f", of which {args.explorers} explore" if args.explorers else ""
    lines.append(f"{args.actor_name}s: {args.num_actors}, with {args.num_envs} environments each{explorers}")
    return lines


def end_text(args: CommonArgs) -> str:
    """When the run ends: `until the mean return is 475, at most 1,000,000 steps`."""
    by_evaluation = args.stop_eval_return if args.training_goal == args.stop_return else args.stop_return
    goals = [f"the mean return is {args.training_goal:g}"] if args.training_goal is not None else []
    goals += [f"an evaluation returns {by_evaluation:g}"] if by_evaluation is not None else []
    limits = f"{args.total_steps:,} steps" + ("" if args.max_seconds is None else f" or {args.max_seconds:g} s")
    return f"until {' or '.join(goals)}, at most {limits}" if goals else f"{limits}, without a goal (--stop-return)"


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
    settings, parts = vars(args), list[str]()  # not every chapter has all of them
    if "reward_clip" in settings:
        clipped, scale = settings["reward_clip"], settings["reward_scale"]
        rewards = "clipped to -1, 0, 1 (--no-reward-clip: as they are)" if clipped else "as they are"
        parts.append(f"rewards {rewards}{f' x {scale:g}' if scale != 1.0 else ''}")
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
