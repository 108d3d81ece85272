"""The command line: defaults, presets, resumed settings, and one line about anything a user can fix."""

import dataclasses
import importlib
import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from envs import Env
from gymnasium.spaces import Box, Discrete
from harness import ALL_CHAPTERS

from a3c_mp.algorithms import apex_settings
from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.cli import parse_args, parse_plain
from a3c_mp.cli.flags import OTHER_NAMES, as_flag
from a3c_mp.cli.parser import parse_int
from a3c_mp.config import FORMAT, Between, CommonArgs, Count, Fraction, check_ranges, flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import NetSpec, make_actor_critic
from a3c_mp.population import ppo as population_ppo
from a3c_mp.population.settings import check_settings
from a3c_mp.wrappers import Extras, extras_of, split_id, with_kwargs

HERE = Path.cwd()


@dataclass(frozen=True)
class Base(CommonArgs):
    """Settings of a library."""

    chapter = "chapter"

    gamma: Fraction = 0.99
    """discount for each agent step"""
    trace: Fraction = 0.9
    """its decay"""
    runs_dir: Path = HERE / "runs"
    """absolute, as all paths of a command line are"""


@dataclass(frozen=True)
class Args(Base):
    """A chapter's settings."""

    passes: Count = 1
    """times that every sample is learned from; 100% of them"""
    order: Literal[1, 2] = 1
    """of the method"""
    switch: bool | None = None
    """on, off or neither"""
    schedule: Literal["linear", "cosine"] | None = "linear"
    """how it falls"""
    parts: tuple[bool, ...] = ()
    """which of them learn"""


PRESETS = {"CartPole-v1": {"stop_return": 475.0, "gamma": 0.98}, "PongNoFrameskip-v4": {"stop_return": 18.0}}


def parse(*argv):
    return parse_args(Args, PRESETS, "A chapter.", argv)


def refused(*argv):
    """The line that a user gets to see."""
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def saved_run(tmp_path):
    """A function that makes a run folder whose config.json has these settings on top of the defaults."""

    def save(algorithm="chapter", **settings):
        args = {**dataclasses.asdict(Args()), "runs_dir": "somewhere", **settings}
        args = {name: value for name, value in args.items() if value != "left out"}
        (tmp_path / "config.json").write_text(json.dumps({"format": FORMAT, "algorithm": algorithm, "args": args}))
        return tmp_path

    return save


# ---- values


def test_flags_override_presets_and_presets_override_defaults():
    assert parse() == Args(stop_return=18.0)
    cartpole = Args(env_id="CartPole-v1", stop_return=475.0, gamma=0.98, reward_clip=False)
    assert parse("--env-id", "PongNoFrameskip-v4", "--env_id=CartPole-v1") == cartpole
    assert parse("--env-id=CartPole-v1", "--gamma", "0.5", "--stop-return", "NONE") == replace(
        cartpole, stop_return=None, gamma=0.5
    )
    frozen = Args(env_id="FrozenLake-v1", reward_clip=False, reward_scale=None)
    assert parse("--env-id", "FrozenLake-v1", "--stop-return", "none") == frozen
    assert parse("--env-id", "Nowhere-v0") == Args(env_id="Nowhere-v0"), "without a preset"


def test_flags_are_read_in_either_spelling_and_may_turn_off_what_has_no_effect():
    assert parse_args(PPOArgs, {}, "", ["--num-envs", "1", "--explore-envs", "0"]).explorers == 0
    args = parse("--num-envs", "4", "--max_seconds=2.5", "--cuda", "--runs-dir", "/tmp/x", "--stop-return", "-1e3")
    assert (args.num_envs, args.max_seconds, args.cuda, args.runs_dir) == (4, 2.5, True, Path("/tmp/x"))
    assert args.stop_return == -1000.0
    assert parse("--cuda", "--no-cuda").cuda is False


def test_a_default_in_the_body_of_a_chapter_gives_way_only_to_what_stands_there_too():
    """A copy of a chapter whose default a preset of the library would change without a word."""

    @dataclass(frozen=True)
    class Copy(PPOArgs):
        chapter = "copy"
        changes: ClassVar[dict[str, dict[str, Any]]] = {"CartPole-v1": {"num_envs": 2, "gamma": 0.5}}
        vectors: ClassVar = {"num_envs": 5}

        num_envs: Count = 3
        batch_size: Count = 6

    presets = {"CartPole-v1": {"batch_size": 64, "learning_rate": 0.25}, "PongNoFrameskip-v4": {"num_envs": 16}}

    def found(args_class, env_id):
        args = parse_args(args_class, presets, "", ["--env-id", env_id])
        return args.num_envs, args.batch_size, args.gamma, args.learning_rate

    assert found(Copy, "CartPole-v1") == (2, 6, 0.5, 0.25), "the rate is inherited"
    assert found(Copy, "PongNoFrameskip-v4") == (3, 6, 0.99, PPOArgs.learning_rate), "images of the library have 16"
    assert found(Copy, "Acrobot-v1") == (5, 6, 0.99, PPOArgs.learning_rate), "and vectors 8 and 64"
    assert found(PPOArgs, "CartPole-v1") == (PPOArgs.num_envs, 64, 0.99, 0.25)


def test_without_a_preset_the_environment_has_the_goal():
    goals = {"Acrobot-v1": -100.0, "Taxi-v4?is_rainy=true": 8.0, "CartPole-v0": 195.0, "CliffWalking-v1": None}
    assert {env_id: parse("--env-id", env_id).stop_return for env_id in goals} == goals
    assert parse_args(Args, {"CartPole-v0": {"gamma": 0.5}}, "", ["--env-id", "CartPole-v0"]).stop_return is None


def test_the_module_of_an_environment_is_imported_for_its_goal_and_its_spaces(tmp_path, monkeypatch):
    entry = "gymnasium.envs.classic_control:PendulumEnv"
    code = f'import gymnasium\ngymnasium.register("Swing-v0", entry_point="{entry}", reward_threshold=12.5)\n'
    (tmp_path / "module_with_a_goal.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    args = parse_args(PPOArgs, {}, "", ["--env-id", "module_with_a_goal:Swing-v0"])
    assert args.stop_return == 12.5
    assert args.unroll_length == PPOArgs.continuous["unroll_length"] != PPOArgs.unroll_length


def test_ape_x_has_settings_for_both_kinds_of_actions():
    env_ids = ("MountainCarContinuous-v0", "Acrobot-v1", "Nowhere-v0")
    found = [parse_args(apex_settings.Args, apex_settings.PRESETS, "", ["--env-id", env_id]) for env_id in env_ids]
    assert [(args.algo, args.learning_starts, args.target_period) for args in found] == [
        *(("ddpg", 1_000, 1), ("dqn", 1_000, 200), ("dqn", 20_000, 2_000))
    ]
    assert not found[0].reward_clip


def test_an_algorithm_has_defaults_of_its_own_for_a_kind_of_environment():
    def found(args_class, *flags):
        args = parse_args(args_class, {}, "", ["--env-id", "MountainCarContinuous-v0", *flags])
        return args.algo, args.batch_size, args.target_period, args.n_step

    @dataclass(frozen=True)
    class Own(apex_settings.Args):
        continuous = {"algo": "td3", "batch_size": 99}  # noqa: RUF012
        n_step: int = 1

    @dataclass(frozen=True)
    class OwnTD3(apex_settings.Args):
        continuous_td3 = {"n_step": 7}  # noqa: RUF012
        n_step: int = 1

    assert found(apex_settings.Args) == ("ddpg", 128, 1, 3)
    assert found(apex_settings.Args, "--algo", "td3") == ("td3", 256, 2, 3)
    assert found(Own, "--algo", "td3") == ("td3", 99, apex_settings.Args.target_period, 1)
    assert found(OwnTD3, "--algo", "td3") == ("td3", apex_settings.Args.batch_size, apex_settings.Args.target_period, 7)
    assert found(OwnTD3) == ("ddpg", 128, 1, 1)


class Drawn(Env):
    """Images, with actions of either kind, as in CarRacing-v3 (which needs Box2D)."""

    observation_space = Box(0, 255, (96, 96, 3), "uint8")

    def __init__(self, continuous=True):
        self.action_space = Box(-1.0, 1.0, (3,)) if continuous else Discrete(5)


@pytest.mark.parametrize("chapter", ["train_a3c_data", "train_a3c_grad", "train_impala", "train_task"])
def test_chapters_of_rollouts_have_settings_for_each_kind_of_environment(chapter, register):
    """Images: Atari with what its preset adds, and others, without bursts where actions are continuous."""
    args_class, drawn = importlib.import_module(chapter).Args, register("Drawn-v0", Drawn)
    vectors, continuous, images = args_class.vectors, args_class.continuous, args_class.images
    for env_id, expected in {
        "Nowhere-v0": {"num_envs": args_class.num_envs},
        "Acrobot-v1": {**vectors, "num_envs": 8},
        "Pendulum-v1": {**continuous, "num_envs": 8},
        "PongNoFrameskip-v4": {**images, "gamma": 0.5},
        f"{drawn}?continuous=false": {**images, "gamma": 0.99},
        drawn: {**continuous, **images, "explore_envs": 0.0},
    }.items():
        found = parse_args(args_class, {"PongNoFrameskip-v4": {"gamma": 0.5}}, "", ["--env-id", env_id])
        assert expected.items() <= vars(found).items(), env_id


def test_a_population_has_settings_for_images_with_continuous_actions(register):
    args = parse_args(population_ppo.Args, {}, "", ["--env-id", register("Drawn-v0", Drawn)])
    check_settings(args, image=True)
    assert (args.genes, args.entropy_coef) == (population_ppo.Args.genes, 0.0), "no gene that begins at 0"


def test_both_ways_to_give_keyword_arguments_are_the_same(register):
    env_id, pair = register("Drawn-v0", Drawn), "continuous=false"
    whole = parse_args(PPOArgs, {}, "", ["--env-id", f"{env_id}?{pair}"])
    assert (whole.env_id, whole.env_kwargs, whole.num_envs) == (f"{env_id}?{pair}", (), 16)
    for flags in (["--env-kwargs", pair], ["--env_kwargs=continuous=true", "--env-kwargs", pair]):
        assert parse_args(PPOArgs, {}, "", ["--env-id", env_id, *flags]) == whole
    assert parse("--env-id", "CartPole-v1", "--env-kwargs", "sutton_barto_reward=true").gamma == 0.98, "the preset's"
    assert refused("--env-kwargs", "size").startswith("env-kwargs=size: must be name=value; for instance")


def test_no_run_to_resume_may_be_said():
    assert parse("--resume", "none") == parse()


def test_keyword_arguments_from_python_keep_their_types(monkeypatch):
    monkeypatch.setenv("A3C_ACTOR", "-2")
    given = {"a": "1", "b": "true", "c": "null", "d": "text", "e": 2.5, "f": [1, "2"], "g": None}
    given |= {"l": " \t", "m": '{"a": 1}', "n": (5, 5), "o": {1: 2}, "p": {"q": [np.int64(1)]}, "r": [(1, 2)]}
    others = {"h": np.int64(3), "i": "sim-{actor}", "j": Path("/a"), "k": np.arange(2)}
    _, *pairs = as_flag("env_kwargs", given | others)
    _, found = split_id(with_kwargs("A-v0", [pair.strip() for pair in pairs]))
    assert found.pop("i") == "sim--2", "computed where the environment is made"
    assert found == given | {"h": 3, "j": "/a", "k": [0, 1]}
    with pytest.raises(ConfigError, match=r"env-kwargs=.*: must be a number, text"):
        as_flag("env_kwargs", {"a": object()})


def test_an_error_about_bad_input_is_the_same_in_another_process():
    error = pickle.loads(pickle.dumps(ConfigError("seed", "x", "it is no number", "give one")))
    assert (str(error), error.what, error.fix) == ("seed=x: it is no number; give one", "seed", "give one")


def test_what_is_done_to_an_environment_is_in_its_id_and_settings_follow_what_it_then_gives():
    flags = ["--env-id", "CarRacing-v3", "--frame-size", "84", "--obs-keys", "a", "--env-kwargs", "lap=1"]
    flags += ["--obs-keys", "b", "--wrapper", "m:A,shape=(8, 9),x=a b", "--wrapper", "m:B"]
    args = parse_args(PPOArgs, {}, "", flags)
    assert (args.wrapper, args.obs_keys, args.frame_size, args.frame_stack) == ((), (), None, None)
    assert args.env_id.startswith("CarRacing-v3?lap=1#wrapper=m:A,shape=(8,+9),x=a+b&wrapper=m:B&obs_keys=a&")
    assert extras_of(args.env_id) == Extras(("m:A,shape=(8, 9),x=a b", "m:B"), ("a", "b"), 84)
    assert parse_args(PPOArgs, {}, "", ["--env-id", args.env_id]).env_id == args.env_id
    wrapper = ["--wrapper", "gymnasium.wrappers:AtariPreprocessing", "--frame-stack", "4"]
    args = parse_args(PPOArgs, {"PongNoFrameskip-v4": {"gamma": 0.5}}, "", ["--env-id", "PongNoFrameskip-v4", *wrapper])
    assert (args.net, args.gamma) == ("a3c", 0.5), "a preset is for images here, too"
    wrapper, of_a_box = (
        ["--wrapper", "gymnasium.wrappers:DiscretizeAction,bins=5"],
        {"Pendulum-v1": {"noise_steps": 16}},
    )
    args = parse_args(PPOArgs, of_a_box, "", ["--env-id", "Pendulum-v1", *wrapper])
    assert (args.noise_steps, args.num_envs) == (1, PPOArgs.vectors["num_envs"]), "it was for other actions"
    preset = {"Acrobot-v1": {"reward_scale": 0.1, "stop_return": -90.0}}
    for presets, goal in ((preset, -90.0), ({}, -100.0)):
        for wrapper, expected in (
            ("FlattenObservation", goal),
            ("TimeLimit,max_episode_steps=9", goal),
            ("NormalizeReward", None),
        ):
            flags = ["--env-id", "Acrobot-v1", "--wrapper", f"gymnasium.wrappers:{wrapper}"]
            args = parse_args(PPOArgs, presets, "", flags)
            assert (args.stop_return, args.reward_scale) == (expected, 0.1 if expected == -90.0 else None), wrapper
    pytest.importorskip("Box2D")  # gymnasium has no wheel of it for Python 3.14
    args = parse_args(
        PPOArgs, {}, "", ["--env-id", "CarRacing-v3", "--wrapper", "gymnasium.wrappers:FlattenObservation"]
    )
    assert args.num_envs == PPOArgs.continuous["num_envs"]


def test_observations_that_are_flattened_have_the_settings_of_vectors(register):
    env_id = register(changes={"observation_space": Box(-np.inf, np.inf, (64, 64))})
    assert parse_args(PPOArgs, {}, "", ["--env-id", env_id]).num_envs == PPOArgs.vectors["num_envs"]


@pytest.mark.parametrize(
    ("argv", "clipped", "preset"),
    [
        ("", True, {}),
        ("--env-id ALE/Breakout-v5", True, {}),
        ("--env-id Acrobot-v1", False, {}),
        ("--env-id Acrobot-v1 --reward-clip", True, {}),
        ("--no-reward-clip", False, {}),
        ("--env-id CartPole-v1", True, {"CartPole-v1": {"reward_clip": True}}),
        ("", False, {"PongNoFrameskip-v4": {"reward_clip": False}}),
    ],
)
def test_rewards_are_clipped_on_atari_unless_a_flag_or_a_preset_says_otherwise(argv, clipped, preset):
    assert parse_args(PPOArgs, preset, "", argv.split()).reward_clip is clipped


WHOLE = {
    "1000000": 10**6, "1e6": 10**6, "1_000_000": 10**6, "1M": 10**6, "4.1M": 4_100_000, "2.01k": 2010,
    "2_000K": 2 * 10**6, "2.5e3": 2500, "-3": -3, "4.0": 4, " 7 ": 7, "9" * 20: int("9" * 20),
}  # fmt: skip


def test_whole_numbers_in_every_notation():
    found = {text: parse_int(text) for text in WHOLE}
    assert found == WHOLE
    assert {type(number) for number in found.values()} == {int}
    for text in ("1.5", "1e-3", "many", "", "nan", "inf", "-inf", "1e400", "M", "1G", "1kk"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_int(text)


def test_a_script_without_presets_may_have_words_that_must_be_given():
    @dataclass(frozen=True)
    class Plain:
        checkpoint: str
        others: tuple[Path, ...]
        episodes: Count = 10
        rows: tuple[str, ...] = ("games",)

    assert parse_plain(Plain, "Play.", ["a.pt", "--episodes", "3"]) == Plain("a.pt", (), 3)
    assert parse_plain(Plain, "Play.", ["--episodes", "3", "a.pt", "b.pt"]) == Plain("a.pt", (Path("b.pt"),), 3)
    with pytest.raises(ConfigError, match=r"^checkpoint: must be given$"):
        parse_plain(Plain, "Play.", [])
    with pytest.raises(ConfigError, match=r"^rows: has no values; name some, or leave it out$"):
        parse_plain(Plain, "Play.", ["a.pt", "--rows"])


def test_help_has_groups_docstrings_and_the_defaults_of_the_preset(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--env-id", "CartPole-v1", "--help")
    assert not end.value.code
    printed = " ".join(capsys.readouterr().out.split())
    parts = "A chapter.|Settings of every chapter|--total-steps|discount for each agent step (default: 0.98)"
    parts += "|Settings of a library|its decay"
    found = [printed.index(part) for part in f"{parts}|A chapter's settings|100% of them".split("|")]
    assert found == sorted(found)


# ---- refusals


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--num-envs 4097", "num-envs=4097: must be between 1 and 4096"),
        ("--gamma -0.1", "gamma=-0.1: must be between 0 and 1"),
        ("--total-steps -1e6", "total-steps=-1000000: must be 1 or more"),
        ("--stop-return inf", "stop-return=inf: must be a finite number"),
        ("--resume", "resume: expected one argument"),
        ("--fast --cuda --num-envs 8", "fast: there is no such flag; see --help"),
        ("--cuda yes", "arguments=yes: a value without a flag; switches take no value: --NAME turns one on, --no-NAME"),
        ("--cuda=true", "cuda: switches take no value"),
        (
            "--total-timesteps=1",
            "total-timesteps=1: there is no such flag; here it is --total-steps (total timesteps: stop",
        ),
        ("--no-torch-deterministic", "no-torch-deterministic: there is no such flag; here it is --deterministic"),
        ("--save_freq 10000", "save-freq=10000: there is no such flag; here it is --checkpoint-steps (additional"),
        ("--lstm", "lstm: there is no such flag; train_impala.py has it"),
        ("--capture-video", "capture-video: there is no such flag; play.py --video records one"),
    ],
)
def test_bad_input_is_one_line_that_says_what_and_why_and_what_to_do(argv, line):
    assert refused(*argv.split()).startswith(line)


@pytest.mark.parametrize("words", [["--cuda\r"], ["--seed", "3", "\r"]])
def test_windows_line_ends_of_a_script_are_named(words):
    assert refused(*words).startswith("arguments: the script has Windows line ends")


class Undecorated(PPOArgs):
    angle_coef: float = 0.5


@dataclass(frozen=True)
class Untyped(PPOArgs):
    unroll_length = 48


@dataclass(frozen=True)
class Inherited(Untyped):
    chapter = "own"


class UndecoratedGamma(PPOArgs):
    gamma: float = 0.5


@dataclass(frozen=True)
class BelowGamma(UndecoratedGamma):
    chapter = "own"


@dataclass(frozen=True)
class OfTwoKinds(PPOArgs):
    sizes: tuple[int, str] = (1, "a")


@dataclass(frozen=True)
class OfAnyKind(PPOArgs):
    sizes: tuple = (64, 64)


@dataclass(frozen=True)
class OneOrTheOther(PPOArgs):
    share: int | float = 0.5


@pytest.mark.parametrize(
    ("args_class", "presets", "line"),
    [
        (Undecorated, {}, r"Undecorated: its settings have no effect; put @dataclass\(frozen=True\) above it"),
        (Untyped, {}, "unroll-length=48: Untyped sets it without effect; write unroll_length: Count = 48"),
        (Inherited, {}, "unroll-length=48: Untyped sets it without effect; write unroll_length: Count = 48"),
        (BelowGamma, {}, r"gamma=0.5: UndecoratedGamma sets it .*, with @dataclass\(frozen=True\) above the class"),
        (OfTwoKinds, {}, r"sizes: no flag can be a tuple\[int, str\]; .*"),
        (OfAnyKind, {}, "sizes: no flag can be a .*tuple.*"),
        (OneOrTheOther, {}, r"share: no flag can be a int \| float; .*"),
        (PPOArgs, {"CartPole-v1": {"angle": 1}}, "angle: a preset of CartPole-v1 sets it, .* no such setting"),
    ],
)
def test_settings_of_a_chapter_of_ones_own_that_have_no_effect_are_refused(args_class, presets, line):
    with pytest.raises(ConfigError, match=f"^{line}$"):
        parse_args(args_class, presets, "", ["--env-id", "CartPole-v1"])


def test_line_breaks_do_not_break_the_line():
    error = ConfigError("run-name", "two\nlines", "must be\none line", "fix\r\nit")
    assert str(error) == "run-name=two lines: must be one line; fix it"


def test_flags_and_values_of_older_versions_are_answered_with_those_of_today():
    renamed = {"entropy-cost": "entropy-coef", "value-cost": "value-coef", "clip-grad": "max-grad-norm"}
    renamed |= {"entropy-cost-end": "entropy-coef-end", "num-minibatches": "batch-size", "net-arch": "hidden"}
    for old, new in renamed.items():
        with pytest.raises(
            ConfigError, match=rf"^{old}=1: there is no such flag; (here .* --{new} \(.+\)|perhaps .* --{new})$"
        ):
            parse_args(PPOArgs, {}, "", [f"--{old}=1"])
    for old, new in {"book": "nature", "paper": "a3c"}.items():
        with pytest.raises(ConfigError, match=f"^net={old}: must be .*; its name is {new} now$"):
            make_actor_critic(Box(0, 255, (4, 84, 84), "uint8"), Discrete(2), NetSpec(old))


def test_names_of_other_libraries_lead_to_flags_that_there_are():
    flags = {flag_name(field.name) for chapter in ALL_CHAPTERS for field in dataclasses.fields(chapter.args_class)}
    other = " ".join(OTHER_NAMES.values()).split()
    assert set(OTHER_NAMES) <= flags
    assert len(set(other)) == len(other)
    assert not set(other) & flags


def test_ranges_hold_for_presets_too_and_both_ends_belong_to_them():
    @dataclass
    class Settings:
        share: Annotated[float, Between(0.25, 0.75)] | None

    for share in (0.25, 0.75, None):
        check_ranges(Settings(share))
    for share in (0.2499, 0.7501):
        with pytest.raises(ConfigError, match=r"between 0\.25 and 0\.75"):
            check_ranges(Settings(share))
    with pytest.raises(ConfigError, match="gamma=2"):
        parse_args(Args, {"CartPole-v1": {"gamma": 2}}, "", ["--env-id", "CartPole-v1"])


# ---- resume


def test_a_resumed_run_keeps_its_settings_except_for_flags_given_now(saved_run):
    folder = saved_run(env_id="CartPole-v1", num_envs=7, gamma=0.5, stop_return=None, passes="left out")
    args = Args(env_id="CartPole-v1", num_envs=7, gamma=0.5, resume=folder, runs_dir=Path("somewhere").absolute())
    assert parse("--resume", str(folder), "--env-id", "CartPole-v1") == args, "no preset comes in between"
    now = parse("--resume", str(folder), "--total-steps", "2e6", "--checkpoint-steps=7")
    assert now == dataclasses.replace(args, total_steps=2_000_000, checkpoint_steps=7)
    assert parse("--resume", str(saved_run(checkpoint_steps=7))).checkpoint_steps == 7
    others = parse("--resume", str(saved_run(order=2, switch=None, schedule=None, parts=[True, False])))
    assert (others.order, others.switch, others.schedule, others.parts) == (2, None, None, (True, False))
    assert parse("--parts", "false", "True").parts == (False, True)


def test_the_folder_of_a_resumed_run_is_the_one_that_is_named(saved_run):
    line = refused("--resume", str(folder := saved_run()), "--run-name", "other")
    assert line.startswith(f"run-name=other: --resume={folder} does not use it; start a new run without --resume, or")


def test_settings_of_another_chapter_or_version_are_refused(saved_run):
    line = refused("--resume", str(saved_run("impala", replay_size=1000)))
    assert "config.json belongs to another chapter, impala; resume it with the script that started it" in line
    line = refused("--resume", str(saved_run(turbo=True)))
    assert "config.json has turbo: there is no such flag" in line
    assert line.endswith("remove it there")
    assert refused("--resume", str(saved_run(env_kwargs=["--help"]))).startswith("env-kwargs=--help: must be name")


@pytest.mark.parametrize("form", ["1", "null", str(FORMAT - 1), str(FORMAT + 1)])
def test_a_run_of_another_version_is_refused_by_name(form, saved_run):
    path = saved_run() / "config.json"
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {form}'))
    writer = "a3c-mp 0.1, in format 1" if form in ("1", "null") else f"another version of a3c-mp, in format {form}"
    assert f"config.json was written by {writer}; this version reads" in refused("--resume", str(path.parent))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"args": 3}', b'{"args": []}', b'{"args": null}', b"\xff"]
)
def test_a_config_that_cannot_be_read_is_named(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    line = refused("--resume", str(tmp_path))
    assert line.startswith(f"resume={tmp_path}: {tmp_path / 'config.json'} cannot be read")


@pytest.mark.parametrize(
    ("setting", "value", "message", "now"),
    [
        ("num_envs", 0, "num-envs=0: must be between 1 and 4096", "--num-envs 4"),
        ("precision", "fp8", "precision=fp8: must be one of", "--precision=fp32"),
        ("cuda", "maybe", "cuda: switches take no value", "--no-cuda"),
    ],
)
def test_damaged_settings_of_a_saved_run_are_named_with_their_file(setting, value, message, now, saved_run):
    """People edit these files."""
    folder = saved_run(**{setting: value})
    line = refused("--resume", str(folder))
    assert line.startswith(f"resume={folder}: {folder / 'config.json'} has {message}"), line
    assert line.endswith("; correct it there, or give its flag now"), line
    assert parse("--resume", str(folder), *now.split()).resume == folder
    line = refused("--resume", str(folder), *now.split(), "--passes", "0")
    assert line.startswith("passes=0: must be"), "what is given now is an error of its own"
