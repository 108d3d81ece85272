"""Learners in parallel: one gradient for all, one address for all, and a clear end for all when one is lost."""

import os
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from harness import BUSY_SECONDS

import train_a3c_data
from a3c_mp.errors import PeerLost
from a3c_mp.maths.losses import normalize
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes import supervisor
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.learners import DEATH_SECONDS, GLOO_SECONDS, LEARNER_CLOSE_SECONDS, Learners
from a3c_mp.processes.supervisor import START_SECONDS, WAIT_SECONDS
from a3c_mp.run.learner import Learner

pytestmark = pytest.mark.usefixtures("forked")


def make_learners(size, target, *parts, num_actors=2):
    """Learners of a run that has not started."""
    args = SimpleNamespace(num_learners=size, num_actors=num_actors, cuda=False, hang_seconds=60.0)
    run = SimpleNamespace(args=args, steps=0, updates=0, should_stop=lambda: False, finish=lambda error: None)
    return Learners(run, target, *parts)


def make_net(seed):
    torch.manual_seed(seed)
    net = make_actor_critic(Box(-1.0, 1.0, (3,)), Discrete(2))
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def loss(args, net, group, obs, weights):
    """Advantages are normalized over the batches of all learners."""
    logits, values = net(obs)
    advantages = normalize(values.detach() - logits.detach()[:, 0], weights, group.all_reduce_mean)
    return (weights * advantages * logits.square().sum(1)).mean() + values.square().mean(), {}


def step(net, optimizer, group, max_grad_norm=1e9):
    """A step on this learner's share of the same samples; the gradients, and as the last element the loss."""
    rng = torch.Generator().manual_seed(0)
    samples = torch.randn(24, 3, generator=rng), torch.rand(24, generator=rng)
    obs, weights = (part.chunk(group.size)[group.rank] for part in samples)
    args = SimpleNamespace(precision="fp32", max_grad_norm=max_grad_norm, normalize_obs=True)
    run = SimpleNamespace(counters=Counter())
    learner = SimpleNamespace(args=args, net=net, optimizer=optimizer, group=group, run=run)
    Learner.update_norm(learner, samples[0].tensor_split([9])[group.rank] if group.size > 1 else samples[0], "")
    metrics = train_a3c_data.gradients(args, learner, loss, group, obs, weights)
    optimizer.step()
    return [*(parameter.grad.clone() for parameter in net.parameters()), metrics["losses/total"]]


def learn_together(group, *progress):
    """Two steps; the net after them, the last gradients, and the weights and addresses of all learners."""
    net, optimizer = make_net(seed=group.rank)  # the others' weights are not the first one's until they synchronize
    group.broadcast_state(net, optimizer)
    step(net, optimizer, group)
    grads = step(net, optimizer, group)
    weights = [parameter.detach() for parameter in net.parameters()]
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    return net, grads, group.all_gather_object(weights), group.all_gather_object(listening)


def test_the_gradient_is_that_of_one_learner_over_the_union_of_the_batches():
    net, optimizer = make_net(seed=0)
    step(net, optimizer, LearnerGroup())
    expected = step(net, optimizer, LearnerGroup())
    with make_learners(2, learn_together) as group:
        together, found, (first, second), addresses = learn_together(group)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    for x, y in zip(together.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, first, second)), "the learners' weights do not drift apart"
    assert {address for each in addresses for address in each} == {"127.0.0.1"}, "other machines cannot reach them"
    *clipped, _ = step(net, optimizer, LearnerGroup(), max_grad_norm=0.1)
    assert torch.stack([grad.norm() for grad in clipped]).norm().item() == pytest.approx(0.1, rel=1e-3)


def exchange_for_ever(group, *progress):
    while True:
        group.all_gather_object(os.getpid())


def fail_in_the_third(group, *progress):
    for _ in range(2):
        group.all_gather_object(os.getpid())
    raise ArithmeticError("the gradient caught fire")


def sleep_for_ever(group, *progress):
    group.all_gather_object(os.getpid())
    time.sleep(600)


def pids(learners):
    return [process.pid for process in learners.processes]


def exchange_until_lost(learners, act=lambda pids: None):
    """Exchange messages; `act` on the pids of the others once they run."""
    with learners as group:
        group.all_gather_object(os.getpid())
        act(pids(learners))
        since = time.monotonic()
        while time.monotonic() - since < 60:
            group.all_gather_object(os.getpid())


@pytest.fixture
def short_waits(monkeypatch):
    for name in ("SIGNAL_SECONDS", "DEATH_SECONDS", "LEARNER_CLOSE_SECONDS"):
        monkeypatch.setattr(f"a3c_mp.processes.learners.{name}", 0.5)


class Unloadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return (int, ("no number",))


@pytest.mark.parametrize(
    ("target", "parts", "reason"),
    [
        (fail_in_the_third, (), "the gradient caught fire"),
        (exchange_for_ever, (Unloadable(),), r"learner 1 .* ended with exit code 1"),  # before it can meet the others
    ],
)
def test_a_learner_that_fails_is_named_with_the_reason(target, parts, reason):
    with pytest.raises(PeerLost, match=reason):
        exchange_until_lost(make_learners(2, target, *parts))


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("how", ["killed", "signal"])
def test_a_learner_that_never_comes_to_the_others_is_not_waited_for(monkeypatch, how):
    learners, nowhere = make_learners(2, exchange_for_ever), ("127.0.0.1", 9)
    own = learners._rendezvous
    monkeypatch.setattr(learners, "_rendezvous", lambda rank: (nowhere if rank else own(0)[0], None, 60.0))
    ends = time.monotonic() + 2.0  # it has started by then
    learners.run.should_stop = lambda: how == "signal" and time.monotonic() > ends
    if how == "killed":
        threading.Timer(2.0, lambda: os.kill(*pids(learners), signal.SIGKILL)).start()
    with pytest.raises(PeerLost, match="was killed by SIGKILL" if how == "killed" else "asked to stop before all"):
        exchange_until_lost(learners)
    assert time.monotonic() - ends < BUSY_SECONDS


@pytest.mark.usefixtures("short_waits")
def test_a_frozen_learner_is_given_up_after_a_time():
    learners, frozen = make_learners(2, exchange_for_ever), []
    learners.peer_seconds = 5  # also to meet

    def freeze(pids):
        os.kill(pids[0], signal.SIGSTOP)
        frozen.extend(pids)

    with pytest.raises(PeerLost, match=r"no answer from learner 1 \(pid.*; if they were only busy, raise --hang-"):
        exchange_until_lost(learners, freeze)
    assert frozen == pids(learners)
    assert not any(psutil.pid_exists(pid) for pid in pids(learners))


def test_learners_wait_for_each_other_as_long_as_a_new_actor_may_take(monkeypatch):
    """Where actors are more than cores, one that is replaced may take longer to its first step."""
    monkeypatch.setattr(supervisor, "cores", lambda: 2)
    for num_actors, seconds in ((2, START_SECONDS), (16, 4 * START_SECONDS)):
        assert make_learners(2, exchange_for_ever, num_actors=num_actors).peer_seconds == 60 + seconds


@pytest.mark.usefixtures("short_waits")
def test_a_signal_ends_the_wait_for_a_frozen_learner():
    """Python runs no signal handler while torch waits, here for two minutes."""
    heard, started = [], time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: heard.append(True))

    def freeze_and_ask(pids):
        os.kill(pids[0], signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

    with pytest.raises(PeerLost):
        exchange_until_lost(make_learners(2, exchange_for_ever), freeze_and_ask)
    assert heard, "the signal comes through in the end"
    assert time.monotonic() - started < 60
    assert signal.set_wakeup_fd(-1) == -1, "nothing is left of it"


def test_a_learner_killed_while_the_first_one_waits_is_noticed_in_seconds_and_the_run_is_saved_before_others_end():
    killed_at, finished = [], []
    learners = make_learners(3, sleep_for_ever)
    learners.run.finish = lambda error: finished.append((str(error), psutil.Process(pids(learners)[1]).status()))

    def kill():
        killed_at.append(time.monotonic())
        os.kill(pids(learners)[0], signal.SIGKILL)

    with pytest.raises(PeerLost) as lost:
        exchange_until_lost(learners, lambda pids: threading.Timer(1.0, kill).start())
    assert time.monotonic() - killed_at[0] < DEATH_SECONDS + LEARNER_CLOSE_SECONDS + BUSY_SECONDS
    assert f"learner 1 (pid {pids(learners)[0]}) was killed by SIGKILL" in str(lost.value)
    [(error, status)] = finished
    assert error == str(lost.value)
    assert status == psutil.STATUS_SLEEPING
    assert not any(psutil.pid_exists(pid) for pid in pids(learners))
    assert not torch.distributed.is_initialized()


def test_the_death_of_a_learner_aborts_what_nccl_would_wait_for(monkeypatch):
    """The thread alone, as gloo notices by itself. What the abort does with NCCL has not been run."""
    aborted = threading.Event()
    learners = make_learners(2, sleep_for_ever)
    monkeypatch.setattr(learners.group, "abort", aborted.set)
    with learners as group:
        group.all_gather_object(os.getpid())
        assert not aborted.wait(2 * WAIT_SECONDS)
        os.kill(pids(learners)[0], signal.SIGKILL)
        assert aborted.wait(GLOO_SECONDS + BUSY_SECONDS)
