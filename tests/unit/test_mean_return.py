"""Games count in the order in which they started."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.run.mean_return import MIN_EPISODES, PATIENCE, ReturnWindow, short_return
from a3c_mp.run.progress import Progress, count


def counted(games):
    return [(actor, episode.episode_return) for actor, episode in games]


def test_a_game_counts_once_all_that_started_before_it_have_ended():
    window = ReturnWindow(num_actors=2, num_envs=2)
    assert counted(window.end(0, [Episode(1.0, 5, env=1)])) == []
    assert counted(window.end(1, [Episode(2.0, 5, env=0), Episode(3.0, 6, env=1)])) == []
    assert counted(window.end(0, [Episode(0.0, 9, env=0)])) == [(0, 0.0), (0, 1.0), (1, 2.0), (1, 3.0)]
    assert counted(window.end(0, [Episode(4.0, 9, env=1)])) == [(0, 4.0)], "its first one ended before the others'"
    assert counted(window.end(0, [Episode(5.0, 9, env=0)])) == []
    assert (window.mean, window.episodes) == (2.0, 5)


def test_games_that_a_long_one_has_held_up_count_one_after_another_until_the_mean_reaches_the_goal():
    window = ReturnWindow(num_actors=1, num_envs=MIN_EPISODES, goal=3.0)
    good, bad = ([Episode(value, 5, env) for env in range(1, MIN_EPISODES)] for value in (4.0, 0.0))
    assert window.end(0, [*good, *bad]) == [], "they wait for the game in environment 0"
    assert len(window.end(0, [Episode(4.0, 9, env=0)])) == MIN_EPISODES
    assert window.has_reached_goal
    assert window.end(0, bad) == [], "the run ends"
    assert (window.mean, window.episodes) == (4.0, MIN_EPISODES)


def test_games_that_explore_or_have_no_finite_return_do_not_count():
    window = ReturnWindow(num_actors=1, num_envs=4, explorers=2)
    ended = window.end(0, [Episode(np.nan if env == 3 else float(env), 5, env) for env in range(4)])
    assert counted(ended) == [(0, 2.0)]
    assert (window.mean, window.episodes) == (2.0, 1)
    long = [counted(window.end(0, [Episode(float(number), 5, env=2 + number % 2)])) for number in range(2, 9)]
    assert long == [[(0, float(number))] for number in range(2, 9)], "those of environments 0 and 1 still run"
    again, everything = ReturnWindow(1, 4, explorers=2), ReturnWindow(1, 4)
    again.load_state_dict(everything.state_dict())
    assert again.state_dict()["games"] == everything.state_dict()["games"][2:], "earlier versions saved all"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0.00"), (1e-4, "0.0001"), (-0.0123, "-0.012"), (0.5, "0.50"), (-12.34, "-12.3"), (1e6, "1000000.0")],
)
def test_a_small_return_is_not_shown_as_zero(value, shown):
    assert short_return(value) == shown


def test_the_first_warning_of_a_kind_is_logged_and_the_last_lines_have_the_total(log, tape):
    progress = Progress(CommonArgs())
    run = SimpleNamespace(counters=progress.counters, log=log)
    for number in (0, 3, 100, 20_000):
        count(run, "obs_values_clipped", number, f"{number} values clipped")
        count(run, "rollouts_not_finite", number // 3, f"{number // 3} rollouts skipped", repeated=True)
    clipped = [message for message in tape.messages if "clipped" in message]
    assert clipped == ["3 values clipped (3 so far)"]
    assert len(tape.messages) == 4
    assert progress.counts == ["20,103 obs values clipped", "6,700 rollouts not finite"]


def test_games_of_a_lost_actor_are_not_waited_for():
    window = ReturnWindow(num_actors=2, num_envs=1)
    assert counted(window.end(1, [Episode(1.0, 5)])) == []
    assert counted(window.lose(0)) == [(1, 1.0)]
    assert counted(window.end(0, [Episode(2.0, 5)])) == [], "the second game of actor 1 started before it"
    assert counted(window.end(1, [Episode(3.0, 5)])) == [(1, 3.0), (0, 2.0)]


def test_a_game_that_does_not_end_is_passed_over_and_counts_when_it_ends_after_all():
    window, found = ReturnWindow(num_actors=1, num_envs=2), []
    for number in range(2 * PATIENCE + 1):
        assert found == []
        found += counted(window.end(0, [Episode(float(number), 1, env=1)]))
    assert found == [(0, float(number)) for number in range(2 * PATIENCE + 1)]
    assert counted(window.end(0, [Episode(-1.0, 99, env=1)])) == [(0, -1.0)], "nothing is waited for"
    assert counted(window.end(0, [Episode(-2.0, 999, env=0)])) == [(0, -2.0)]
    assert counted(window.end(0, [Episode(-3.0, 9, env=1), Episode(-4.0, 9, env=0)])) == [(0, -3.0), (0, -4.0)]


@pytest.mark.parametrize("seed", range(5))
def test_of_many_long_games_few_are_passed_over(seed):
    """Acrobot: 4 of 5 games end after some 90 steps, the others after 500, with the return -length: -172 on average."""
    rng = np.random.default_rng(seed)
    lengths = iter(lambda: int(rng.integers(70, 111)) if rng.random() < 0.8 else 500, None)
    found = play(ReturnWindow(1, 64), lengths, 64, steps=3000)
    means = np.convolve(np.array(found) - 400, np.ones(100) / 100, "valid")
    assert means.max() < -110, "-100 would count as solved"


def test_many_games_that_never_end_are_passed_over_at_last():
    window = ReturnWindow(num_actors=1, num_envs=4)
    found = [window.end(0, [Episode(1.0, 1, env=3)]) for _ in range(window.long_limit)]
    assert window.endless == [(0, 0), (0, 1), (0, 2)]
    assert sum(map(len, found)) == window.long_limit


def test_places_without_an_actor_make_nobody_patient():
    window, alone = ReturnWindow(num_actors=9, num_envs=4), ReturnWindow(num_actors=1, num_envs=4)
    for actor in range(1, 9):
        window.leave(actor)
    ended = [Episode(1.0, 1, env=3)] * 400
    assert window.end(0, ended) == alone.end(0, ended)
    assert (window.total, window.endless) == (4, alone.endless)
    window.lose(1)
    assert window.total == 8


def test_games_of_an_actor_that_has_not_reported_since_they_started_are_not_passed_over():
    """One rollout of the other actor holds hundreds of short games."""
    window, ended = ReturnWindow(num_actors=2, num_envs=2), [Episode(1.0, 1, env=i % 2) for i in range(200)]
    found = [len(window.end(actor, ended)) for actor in (0, 0, 1) * 3]
    assert sum(found) > 600, "those that started before the latest games of either actor"
    for _ in range(2):
        window.end(0, ended)
    assert window.end(1, []), "now it is known that its games still run"
    assert window.endless == []


def test_further_gradients_of_a_rollout_say_nothing_about_games():
    """Chapter 2 sends the games of a rollout with its first gradient."""
    progress, ended = Progress(CommonArgs(num_actors=2, num_envs=8)), [Episode(1.0, 1, env=i % 8) for i in range(1024)]
    for actor, episodes in ((0, ended), (0, None), (1, ended), (0, None)):
        progress.record_rollout(64, episodes, actor, policy_lag=0)
    assert (progress.window.endless, progress.steps) == ([], 256)


def play(window, lengths, num_envs, steps):
    """Counted returns of an actor's environments, whose games have these lengths and return 400 - length."""
    left = [next(lengths) for _ in range(num_envs)]
    played, found = list(left), []
    for _ in range(steps):
        ended = []
        for env in range(num_envs):
            left[env] -= 1
            if left[env] == 0:
                ended.append(Episode(400.0 - played[env], played[env], env))
                left[env] = played[env] = next(lengths)
        found += [episode.episode_return for _, episode in window.end(0, ended)]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_return_is_unbiased_after_a_common_start(seed):
    """Lengths U{20..400} and returns 400 - length have mean 190 whatever is learned; as they finish, first 333."""
    rng = np.random.default_rng(seed)
    lengths = iter(lambda: int(rng.integers(20, 401)), None)
    found = play(ReturnWindow(1, 64), lengths, 64, steps=4000)[:1000]
    assert np.mean(found) == pytest.approx(190, rel=0.05)
    windows = [np.mean(found[max(0, end - 100) : end]) for end in range(20, 1000)]
    assert max(windows) < 300, "never solved"


@given(st.lists(st.integers(1, 9), min_size=40, max_size=40), st.integers(1, 30))
def test_games_that_were_saved_go_on_alike_and_those_of_other_environments_are_refused(lengths, split):
    whole, again = ReturnWindow(1, 4), ReturnWindow(1, 4)
    play(whole, iter(lengths * 9), 4, split)
    again.load_state_dict(whole.state_dict())
    assert again.state_dict() == whole.state_dict()
    ends = [Episode(float(env), 1, env) for env in (2, 0, 3, 1, 2)]
    assert counted(again.end(0, ends)) == counted(whole.end(0, ends))
    assert again.state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match=r"it has \(actors, environments\) \[1, 4\]"):
        ReturnWindow(2, 2).load_state_dict(whole.state_dict())
