"""The command line: defaults, presets, resumed settings, and one line about anything a user can fix."""

import dataclasses
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from harness import ALL_CHAPTERS, CONTINUOUS

from a3c_mp.algorithms import apex_settings
from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.cli import parse_args, parse_int, parse_plain
from a3c_mp.cli.flags import GROUPS, ONLY_IN, OTHER_NAMES
from a3c_mp.config import Between, CommonArgs, Count, Fraction, RewardArgs, check_ranges, flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.run.preflight import check_device, probe_env
from a3c_mp.run.script import exit_with


@dataclass(frozen=True)
class Args(CommonArgs):
    """A chapter's settings."""

    chapter = "chapter"

    gamma: Fraction = 0.99
    """discount for each agent step"""
    passes: Count = 1
    """times that every sample is learned from"""


PRESETS = {"CartPole-v1": {"stop_return": 475.0, "gamma": 0.98}, "PongNoFrameskip-v4": {"stop_return": 18.0}}


def parse(*argv):
    return parse_args(Args, PRESETS, "A chapter.", argv)


def refused(*argv):
    """The line that a user gets to see."""
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    return str(error.value)


@pytest.fixture
def saved_run(tmp_path):
    """A function that makes a run folder whose config.json has these settings on top of the defaults."""

    def save(algorithm="chapter", **settings):
        args = {**dataclasses.asdict(Args()), "runs_dir": "somewhere", **settings}
        args = {name: value for name, value in args.items() if value != "left out"}
        (tmp_path / "config.json").write_text(json.dumps({"algorithm": algorithm, "args": args}))
        return tmp_path

    return save


# ---- values


def test_defaults_are_the_chapters_with_the_preset_of_its_environment():
    assert parse() == Args(stop_return=18.0)


def test_flags_are_read_in_either_spelling():
    assert parse("--num-envs", "4", "--max_seconds=2.5", "--cuda").num_envs == 4
    assert parse("--num-envs", "4", "--max_seconds=2.5", "--cuda").max_seconds == 2.5
    assert parse("--cuda").cuda is True
    assert parse("--cuda", "--no-cuda").cuda is False
    assert parse("--runs-dir", "/tmp/x").runs_dir == Path("/tmp/x")


@pytest.mark.parametrize(
    "argv",
    [
        ["--env-id", "CartPole-v1"],
        ["--env-id=CartPole-v1"],
        ["--env_id", "CartPole-v1"],
        ["--env-id", "PongNoFrameskip-v4", "--env-id", "CartPole-v1"],
    ],
)
def test_the_environment_brings_its_preset(argv):
    args = parse("--seed", "3", *argv)
    assert args == Args(env_id="CartPole-v1", stop_return=475.0, gamma=0.98, seed=3)


def test_any_flag_overrides_the_preset():
    assert parse("--env-id", "CartPole-v1", "--gamma", "0.5").gamma == 0.5
    assert parse("--env-id", "CartPole-v1", "--stop-return", "None").stop_return is None


def test_an_environment_without_a_preset_has_the_chapters_defaults():
    assert parse("--env-id", "FrozenLake-v1", "--stop-return", "none") == Args(env_id="FrozenLake-v1")
    assert parse("--env-id", "Nowhere-v0") == Args(env_id="Nowhere-v0")


def test_without_a_preset_the_environment_has_the_goal():
    assert parse("--env-id", "Acrobot-v1").stop_return == -100.0
    assert parse("--env-id", "Taxi-v4?is_rainy=true").stop_return == 8.0
    assert parse("--env-id", "CartPole-v0").stop_return == 195.0
    assert parse("--env-id", "CliffWalking-v1").stop_return is None
    assert parse_args(Args, {"CartPole-v0": {"gamma": 0.5}}, "", ["--env-id", "CartPole-v0"]).stop_return is None


def test_the_module_of_an_environment_is_imported_for_its_goal_and_its_spaces(tmp_path, monkeypatch):
    entry = "gymnasium.envs.classic_control:PendulumEnv"
    code = f'import gymnasium\ngymnasium.register("Swing-v0", entry_point="{entry}", reward_threshold=12.5)\n'
    (tmp_path / "module_with_a_goal.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    args_class = importlib.import_module("train_a3c_data").Args
    args = parse_args(args_class, {}, "", ["--env-id", "module_with_a_goal:Swing-v0"])
    assert args.stop_return == 12.5
    assert args.unroll_length == args_class.continuous["unroll_length"] != args_class.unroll_length


def test_an_environment_without_a_preset_has_settings_for_its_kind_of_actions():
    found = {env_id: parse_args(apex_settings.Args, apex_settings.PRESETS, "", ["--env-id", env_id]) for env_id in
             ("MountainCarContinuous-v0", "Acrobot-v1", "Nowhere-v0")}  # fmt: skip
    assert [args.algo for args in found.values()] == ["ddpg", "dqn", "dqn"]
    assert [args.learning_starts for args in found.values()] == [1_000, 1_000, 20_000]
    assert [args.target_period for args in found.values()] == [1, 200, 2_000]
    assert found["MountainCarContinuous-v0"].target_rate == apex_settings.CONTINUOUS["target_rate"]
    assert not found["MountainCarContinuous-v0"].reward_clip


@pytest.mark.parametrize("chapter", ["train_a3c_data", "train_a3c_grad", "train_impala", "train_task"])
def test_chapters_of_rollouts_have_settings_for_vectors_and_for_continuous_actions(chapter):
    args_class = importlib.import_module(chapter).Args
    found = {env_id: parse_args(args_class, {}, "", ["--env-id", env_id]) for env_id in ("Acrobot-v1", "Pendulum-v1")}
    defaults = {"Acrobot-v1": args_class.vectors, "Pendulum-v1": args_class.continuous}
    for env_id, args in found.items():
        assert defaults[env_id].items() <= vars(args).items()
        assert args.num_envs == 8
    assert vars(found["Acrobot-v1"]).get("update_epochs") == (4 if issubclass(args_class, PPOArgs) else None)
    assert vars(found["Pendulum-v1"]).get("update_epochs") == (10 if issubclass(args_class, PPOArgs) else None)
    assert parse_args(args_class, {}, "", ["--env-id", "Nowhere-v0"]) == args_class(env_id="Nowhere-v0")


def test_a_flag_that_turns_off_what_has_no_effect_is_no_mistake():
    args_class = importlib.import_module("train_a3c_data").Args
    assert parse_args(args_class, {}, "", ["--num-envs", "1", "--explore-envs", "0"]).explorers == 0
    args_class = importlib.import_module("train_apex").Args
    assert parse_args(args_class, {}, "", ["--optimizer", "rmsprop", "--adam-eps", "0.01"]).adam_eps == 0.01, "both's"


@pytest.mark.parametrize("chapter", ["train_a3c_data", "train_a3c_grad", "train_impala", "train_task"])
def test_images_have_settings_of_their_own_to_which_a_preset_adds(chapter):
    args_class = importlib.import_module(chapter).Args
    net, num_envs = ("nature", 32) if chapter == "train_a3c_grad" else ("a3c", 16)
    passes = 3 if issubclass(args_class, PPOArgs) else None
    continuous = {"num_envs": num_envs, **args_class.continuous, **args_class.images}
    for env_id in ("PongNoFrameskip-v4", "CarRacing-v3?continuous=false", "CarRacing-v3"):
        args = parse_args(args_class, {"PongNoFrameskip-v4": {"gamma": 0.5}}, "", ["--env-id", env_id])
        assert args.gamma == (0.5 if "Pong" in env_id else 0.99)
        assert args.num_envs == (continuous["num_envs"] if env_id == "CarRacing-v3" else num_envs)
        assert args.net == net
        assert vars(args).get("update_epochs") == passes
        assert vars(args).get("replay_proportion") == (0.75 if chapter == "train_impala" else None)
        assert bool(args.explorers) == (passes is not None and env_id != "CarRacing-v3"), "it repeats discrete actions"


def test_both_ways_to_give_keyword_arguments_have_the_same_defaults():
    args_class = importlib.import_module("train_a3c_data").Args
    for env_id, *pairs in (("CarRacing-v3", "continuous=false"), ("CliffWalking-v1", "is_slippery=true")):
        long_id = f"{env_id}?{'&'.join(pairs)}"
        long, short, mixed = (
            parse_args(args_class, {}, "", flags)
            for flags in (
                ["--env-id", long_id],
                ["--env-id", env_id, "--env-kwargs", *pairs, "--seed", "1"],
                ["--env_kwargs=x=1", "--env-id", env_id, "--env-kwargs", *pairs],
            )
        )
        assert long == short == mixed
        assert long.num_envs == (16 if "Racing" in env_id else 8)


def test_observations_that_are_flattened_have_the_settings_of_vectors(register):
    args_class = importlib.import_module("train_a3c_data").Args
    env_id = register(changes={"observation_space": Box(0, 255, (64, 64), "uint8")})
    assert parse_args(args_class, {}, "", ["--env-id", env_id]).num_envs == args_class.vectors["num_envs"]


def test_keyword_arguments_become_part_of_the_environments_id():
    args = parse("--env-id", "CartPole-v1", "--env-kwargs", "sutton_barto_reward=true", "--seed", "3")
    assert (args.env_id, args.env_kwargs, args.seed) == ("CartPole-v1?sutton_barto_reward=true", (), 3)
    assert args.gamma == parse("--env-id", args.env_id).gamma == 0.98, "it has the preset"
    assert refused("--env-kwargs", "size").startswith("env-kwargs=size: must be name=value; for instance")


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("total-timesteps", "here it is --total-steps"),
        ("device", "here it is --cuda"),
        ("no-torch-deterministic", "here it is --deterministic"),
        ("address-family", "see --help"),
        ("capture-video", "play.py --video records one"),
    ],
)
def test_flags_of_other_libraries_get_the_name_here(flag, fix):
    assert refused(f"--{flag}=1") == f"{flag}=1: there is no such flag; {fix}"


def test_names_of_other_libraries_lead_to_flags_that_there_are():
    flags = {flag_name(field.name) for chapter in ALL_CHAPTERS for field in dataclasses.fields(chapter.args_class)}
    other = " ".join(OTHER_NAMES.values()).split()
    assert set(OTHER_NAMES) | set(" ".join(GROUPS.values()).split()) <= flags
    assert len(set(other)) == len(other)
    assert not set(other) & flags


def test_flags_of_other_chapters_name_their_scripts():
    scripts: dict[str, set[str]] = {}  # flag -> those that have it
    for chapter in (*ALL_CHAPTERS, *CONTINUOUS):
        for field in dataclasses.fields(chapter.args_class):
            scripts.setdefault(flag_name(field.name), set()).add(Path(chapter.script).stem)
    every = {Path(chapter.script).stem for chapter in ALL_CHAPTERS}
    listed = {
        flag: {f"train_{name}" for name in names.split()} for names, flags in ONLY_IN.items() for flag in flags.split()
    }
    assert listed == {flag: found for flag, found in scripts.items() if found != every}
    assert refused("--lstm") == "lstm: there is no such flag; only train_impala and train_ray have it"
    assert refused("--no-sync") == "no-sync: there is no such flag; only train_a3c_grad has it"
    assert refused("--n-epochs=3").endswith(
        "; here it is --update-epochs, which only train_a3c_data and train_task have"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1000000", 10**6),
        ("1e6", 10**6),
        ("1_000_000", 10**6),
        ("1M", 10**6),
        ("4.1M", 4_100_000),
        ("2.01k", 2010),
        ("2_000K", 2 * 10**6),
        ("2.5e3", 2500),
        ("-3", -3),
        ("4.0", 4),
        (" 7 ", 7),
    ],
)
def test_whole_numbers_in_every_notation(text, number):
    assert parse_int(text) == number
    assert isinstance(parse_int(text), int)


@pytest.mark.parametrize("text", ["1.5", "1e-3", "many", "", "nan", "inf", "-inf", "1e400", "M", "1G", "1kk"])
def test_what_is_no_whole_number_is_a_value_error(text):
    with pytest.raises(ValueError, match="must be a whole number"):
        parse_int(text)


def test_total_steps_in_scientific_notation():
    assert parse("--total-steps", "2e6").total_steps == 2_000_000


def test_a_script_without_presets_may_have_flags_that_must_be_given():
    @dataclass(frozen=True)
    class Plain:
        checkpoint: str
        """file to play"""
        episodes: Count = 10

    assert parse_plain(Plain, "Play.", ["--checkpoint", "best.pt"]) == Plain("best.pt")
    with pytest.raises(ConfigError, match=r"^checkpoint: must be given; .+$"):
        parse_plain(Plain, "Play.", [])
    with pytest.raises(ConfigError, match=r"^episodes=0: must be 1 or more; .+$"):
        parse_plain(Plain, "Play.", ["--checkpoint", "best.pt", "--episodes", "0"])


def test_help_is_printed_and_no_error(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert not end.value.code
    printed = capsys.readouterr().out
    for expected in ("A chapter.", "--total-steps", "discount for each agent step"):
        assert expected in printed


# ---- refusals


@pytest.mark.parametrize(
    ("argv", "what", "why"),
    [
        (["--num-envs", "0"], "num-envs=0", "between 1 and 4096"),
        (["--num-envs", "4097"], "num-envs=4097", "between 1 and 4096"),
        (["--gamma", "1.01"], "gamma=1.01", "between 0 and 1"),
        (["--gamma", "-0.1"], "gamma=-0.1", "between 0 and 1"),
        (["--total-steps", "0"], "total-steps=0", "1 or more"),
        (["--total-steps", "-1e6"], "total-steps=-1000000", "1 or more"),
        (["--max-seconds", "0"], "max-seconds=0", "0.1 or more"),
        (["--seed", str(2**31)], f"seed={2**31}", "between 0 and"),
        (["--gamma", "nan"], "gamma=nan", "finite"),
        (["--stop-return", "inf"], "stop-return=inf", "finite"),
        (["--max-seconds", "nan"], "max-seconds=nan", "finite"),
        (["--num-envs", "many"], "num-envs=many", "must be a whole number"),
        (["--num-envs", "1.5"], "num-envs=1.5", "must be a whole number"),
        (["--num_envs=1.5"], "num-envs=1.5", "must be a whole number"),
        (["--total-steps", "nan"], "total-steps=nan", "must be a whole number"),
        (["--gamma", "high"], "gamma=high", "must be a number"),
        (["--stop-return", "high"], "stop-return=high", "must be a number"),
        (["--total-steps", "none"], "total-steps=none", "must be a whole number"),
        (["--precision", "fp8"], "precision=fp8", "'auto', 'fp32', 'bf16'"),
        (["--num-envs"], "num-envs: ", "missing"),
        (["--env-id"], "env-id: ", "missing"),
        (["--resume"], "resume: ", "missing"),
        (["--resume", "/no/such/run"], "resume=/no/such/run", "no run in this folder"),
        (["--num-envs", "4\n5"], "num-envs=4 5", "must be a whole number"),
        (["--num-envs", "4", "--num-envs", "five"], "num-envs=five", "must be a whole number"),
        (["--fast"], "fast", "no such flag"),
        (["--fast", "--cuda", "--num-envs", "8"], "fast", "no such flag"),
        (["--fast=yes"], "fast=yes", "no such flag"),
        (["CartPole-v1"], "arguments=CartPole-v1", "perhaps --env-id CartPole-v1"),
        (["my_module:My-v0"], "arguments=my_module:My-v0", "perhaps --env-id my_module:My-v0"),
        (["--seed", "3", "1"], "arguments=1", "a value without a flag; see --help"),
        (["--lstm", "--runs-dir", "x"], "lstm", "there is no such flag"),
        (["--cuda", "yes"], "arguments=yes", "leave it out: switches take no value"),
        (["--cuda=true"], "arguments=--cuda=true", "leave it out: switches take no value"),
    ],
    ids=lambda value: " ".join(value).replace("\n", " ") if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_that_says_what_and_why_and_what_to_do(argv, what, why):
    line = refused(*argv)
    assert "\n" not in line
    assert line.startswith(what), line
    _, reason = line.split(": ", 1)
    assert why in reason, line
    assert reason.rpartition("; ")[2], line


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("--num-envz", "--num-envs"),
        ("--total-step", "--total-steps"),
        ("--gama", "--gamma"),
        ("--precison", "--precision"),
        ("--max_restart", "--max-restarts"),
    ],
)
def test_a_typo_in_a_flag_brings_a_suggestion(typo, meant):
    for argv in ([typo, "3"], [f"{typo}=3"], ["--cuda", typo, "3"]):
        line = refused(*argv)
        assert f"perhaps you meant {meant}" in line, line
        assert "\n" not in line


def test_the_window_of_the_terminal_does_not_change_the_line(monkeypatch):
    lines = set()
    for columns in ("40", "80", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        lines.add((refused("--precision", "fp8"), refused("--num-envs", "many"), refused("--num-envz", "3")))
    assert len(lines) == 1, lines


def test_values_that_break_lines_do_not_break_the_error():
    assert str(ConfigError("run-name", "two\nlines", "must be\none line", "mend\r\nit")) == (
        "run-name=two lines: must be one line; mend it"
    )


def test_ranges_hold_for_presets_too():
    with pytest.raises(ConfigError, match="passes=0"):
        parse_args(Args, {"CartPole-v1": {"passes": 0}}, "", ["--env-id", "CartPole-v1"])


def test_both_ends_of_a_range_belong_to_it():
    @dataclass
    class Settings:
        share: Annotated[float, Between(0.25, 0.75)] | None

    for share in (0.25, 0.75, None):
        check_ranges(Settings(share))
    for share in (0.2499, 0.7501):
        with pytest.raises(ConfigError, match=r"between 0\.25 and 0\.75"):
            check_ranges(Settings(share))


# ---- resume


def test_a_resumed_run_keeps_its_settings_except_for_flags_given_now(saved_run):
    folder = saved_run(env_id="CartPole-v1", num_envs=7, gamma=0.5, stop_return=None)
    args = parse("--resume", str(folder), "--total-steps", "2e6")
    assert args == Args(
        env_id="CartPole-v1", num_envs=7, gamma=0.5, total_steps=2_000_000, resume=folder, runs_dir=Path("somewhere")
    )


@pytest.mark.parametrize("saved", [None, "None", 5000])
def test_steps_between_checkpoints_are_optional(saved, saved_run):
    assert parse().checkpoint_steps is None
    resumed = parse("--resume", str(saved_run(checkpoint_steps=saved)))
    assert resumed.checkpoint_steps == (saved if saved == 5000 else None)
    assert parse("--resume", str(saved_run(checkpoint_steps=7)), "--checkpoint-steps", "1e4").checkpoint_steps == 10_000


def test_no_preset_comes_between_a_resumed_run_and_its_settings(saved_run):
    folder = saved_run(env_id="CartPole-v1", gamma=0.5)
    args = parse("--resume", str(folder), "--env-id", "CartPole-v1")
    assert (args.gamma, args.stop_return) == (0.5, None)


def test_settings_that_are_newer_than_the_run_take_their_defaults(saved_run):
    assert parse("--resume", str(saved_run(passes="left out", gamma=0.5))) == Args(
        gamma=0.5, resume=saved_run(), runs_dir=Path("somewhere")
    )


def test_a_checkpoint_and_a_folder_of_runs_lead_to_a_run(tmp_path):
    for name, time in (("first", 10), ("newest", 30), ("second", 20)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        os.utime(tmp_path / name / "config.json", (time, time))
    newest = tmp_path / "newest"
    assert refused("--resume", str(newest / "checkpoints")).endswith(f"; name the run folder, {newest}")
    assert refused("--resume", str(tmp_path)) == (
        f"resume={tmp_path}: there is no run in this folder; name one of its runs, for instance the newest, {newest}"
    )
    (checkpoint := newest / "checkpoints" / "step_000000000010.pt").touch()
    assert refused("--resume", str(checkpoint)) == (
        f"resume={checkpoint}: it is a checkpoint; name its run folder, --resume {newest}: it goes on from the newest"
    )


def test_a_resumed_run_keeps_its_name(saved_run, monkeypatch):
    folder = saved_run()
    assert parse("--resume", str(folder), "--run-name", folder.name).run_name == folder.name
    monkeypatch.chdir(folder)
    assert parse("--resume", ".", "--run-name", folder.name).run_name == folder.name
    line = refused("--resume", str(folder), "--run-name", "other")
    assert line == f"run-name=other: --resume goes on in {folder}; leave it out"


def test_the_settings_of_another_chapter_are_refused(saved_run):
    line = refused("--resume", str(saved_run("impala", replay_size=1000)))
    assert "config.json belongs to another chapter, impala; resume it with the script that started it" in line


def test_a_setting_that_only_a_newer_version_knows_is_named(saved_run):
    line = refused("--resume", str(saved_run(turbo=True)))
    assert "config.json has turbo, which this version does not know; written by a newer version?" in line
    assert "chapter" not in line


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"args": 3}', b'{"args": null}', b"\xff"])
def test_a_config_that_cannot_be_read_is_named(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    line = refused("--resume", str(tmp_path))
    assert line.startswith(f"resume={tmp_path}: {tmp_path / 'config.json'} cannot be read")
    assert "\n" not in line


DAMAGED_SETTINGS = {
    "out of range": ("num_envs", 0, "num-envs=0: must be between 1 and 4096"),
    "no number": ("num_envs", "abc", "num-envs=abc: must be a whole number"),
    "a list": ("num_envs", [1, 2], "num-envs=[1, 2]: must be a whole number"),
    "a choice that there is not": ("precision", "fp8", "precision=fp8: must be one of"),
    "missing": ("gamma", None, "gamma=None: must be a number"),
    "NaN": ("gamma", float("nan"), "gamma=nan: must be a finite number"),
    "a word for a switch": ("cuda", "maybe", "cuda=maybe: must be true or false"),
}


@pytest.mark.parametrize(("setting", "value", "message"), DAMAGED_SETTINGS.values(), ids=DAMAGED_SETTINGS)
def test_damaged_settings_of_a_saved_run_are_named_with_their_file(setting, value, message, saved_run):
    """People edit these files."""
    folder, flag = saved_run(**{setting: value}), setting.replace("_", "-")
    line = refused("--resume", str(folder))
    assert line.startswith(f"resume={folder}: {folder / 'config.json'} has {message}"), line
    assert line.endswith(f"; correct it there, or give --{flag} now"), line
    assert "\n" not in line
    now = {
        "num_envs": ["--num-envs", "4"],
        "precision": ["--precision=fp32"],
        "gamma": ["--gamma", "0.5"],
        "cuda": ["--no-cuda"],
    }[setting]
    assert parse("--resume", str(folder), *now).resume == folder
    line = refused("--resume", str(folder), *now, "--passes", "0")
    assert line.startswith("passes=0: must be"), "what is given now is an error of its own"


# ---- rewards


@dataclass(frozen=True)
class Learning(RewardArgs):
    """A chapter's settings, rewards among them."""


def clips(*argv, presets=PRESETS):
    presets = {name: {"seed": 1, **preset} for name, preset in presets.items()}
    return parse_args(Learning, presets, "", argv).reward_clip


def test_rewards_are_clipped_on_atari_unless_a_flag_or_a_preset_says_otherwise():
    presets = {"PongNoFrameskip-v4": {}, "CartPole-v1": {}}
    for argv, clipped in {
        (): True,
        ("--env-id", "ALE/Breakout-v5"): True,
        ("--env-id", "CartPole-v1"): False,
        ("--env-id", "Acrobot-v1"): False,
        ("--env-id", "Acrobot-v1", "--reward-clip"): True,
        ("--no-reward-clip",): False,
    }.items():
        assert clips(*argv, presets=presets) is clipped, argv
    assert clips("--env-id", "CartPole-v1", presets={"CartPole-v1": {"reward_clip": True}}) is True
    assert clips(presets={"PongNoFrameskip-v4": {"reward_clip": False}}) is False


@pytest.mark.parametrize(
    "env_id", ["PongNoFrameskp-v4", "CartPole-v9", "no_such_module:Env-v0", "", ":", "two\nlines-v0"]
)
def test_an_environment_that_is_not_known_is_left_to_its_own_message(env_id):
    args = parse_args(Learning, PRESETS, "", [f"--env-id={env_id}"])
    with pytest.raises(ConfigError, match=r"^env-id[=:]"):
        probe_env(args.env_id, Discrete)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "PongNoFrameskip-v4"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_resumed_run_clips_as_it_did(saved, env_id, tmp_path):
    settings = dataclasses.asdict(Learning(env_id=env_id, reward_clip=saved)) | {"runs_dir": "somewhere"}
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": "chapter", "args": settings}))
    assert clips("--resume", str(tmp_path)) is saved
    assert clips("--resume", str(tmp_path), "--no-reward-clip") is False


# ---- environments and devices


def test_check_env_gives_the_spaces_of_the_environment():
    obs_space, action_space = probe_env("CartPole-v1", Discrete)
    assert obs_space.shape == (4,)
    assert action_space == Discrete(2)


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        ("PongNoFrameskp-v4", "`PongNoFrameskp` doesn't exist; perhaps you meant PongNoFrameskip-v4"),
        ("CartPole-v9", "v1"),
        ("CartPole", "CartPole"),
        ("no_such_module:Env-v0", "No module named 'no_such_module'"),
        ("", "ID"),
        ("two\nlines-v0", "two lines"),
        ("CartPole-v1?size=5", "unexpected keyword argument 'size'"),
        ("gymnasium:CartPole-v1?size=5", "; choose another, or other --env-kwargs"),
        ("gymnasium:CartPole", "; perhaps you meant gymnasium:CartPole-v1"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(env_id, reason):
    with pytest.raises(ConfigError, match=r"^env-id[=:]") as error:
        probe_env(env_id, Discrete)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_actions_of_the_wrong_kind_are_one_line():
    assert probe_env("Pendulum-v1", Box)[1].shape == (1,)
    with pytest.raises(ConfigError, match=r"^env-id=Pendulum-v1: its actions are Box.*Discrete.*; .+$"):
        probe_env("Pendulum-v1", Discrete)


def test_whatever_an_environment_raises_is_one_line(register):
    def fail(self):
        raise ZeroDivisionError("first line\nsecond line")

    with pytest.raises(ConfigError, match="first line second line") as error:
        probe_env(register(changes={"__init__": fail}), Discrete)
    assert "\n" not in str(error.value)


def test_check_device_refuses_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device(False) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"^cuda=True: (this torch has|torch sees) no .+; .*--no-cuda.*$"):
        check_device(True)


def test_check_device_takes_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_device(True) == torch.device("cuda")
    assert check_device(False) == torch.device("cpu")


# ---- exit codes


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_script_ends_with_the_code_of_its_main(code):
    with pytest.raises(SystemExit) as end:
        exit_with(lambda: code)
    assert end.value.code == code


def test_bad_input_ends_with_one_line_and_code_2(capsys):
    def main():
        raise ConfigError("num-envs", 0, "must be 1 or more")

    with pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "error: num-envs=0: must be 1 or more; see --help\n"
    assert captured.out == ""
