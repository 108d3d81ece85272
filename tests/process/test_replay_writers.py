"""Writers in processes of their own, which are killed at random instants while the learner draws."""

import os
import signal
import time

import numpy as np
import pytest
import torch.multiprocessing as mp
from gymnasium.spaces import Box, Discrete

from a3c_mp.replay import EnvStep, Prefetch, Replay, Shards, Writer

B, ROWS, STACK, N, GAMMA = 3, 300, 4, 3, 0.9
WIDTH = 200
"""numbers in a frame: writing one takes time in which a process can be killed"""
STEPS = 10
"""in a block"""


def episode_length(env, episode):
    return 3 + (7 * episode + env) % 11


def frame(life, env, episode, t):
    """[..., WIDTH] float32; the same number all over, from which everything else follows."""
    number = ((life * 1000 + episode) * B + env) * 20 + t + 1
    return np.broadcast_to(np.asarray(number, np.float32)[..., None], (*np.shape(number), WIDTH))


def write(shards, shard, life, leave, done):
    """Write without end, a block each time `leave` is raised; every life of the actor has frames of its own."""
    writer, env = Writer(shards, shard, N, GAMMA), np.arange(B)
    episode, t = np.zeros(B, int), np.zeros(B, int)
    while True:
        leave.acquire()
        for _ in range(STEPS):
            obs = stacks(life, env, episode, t)
            t += 1
            ended = t == episode_length(env, episode)
            truncated = ended & (episode % 2 == 1)
            step = EnvStep(obs, t - 1, t.astype(float), ended & ~truncated, truncated, np.zeros(B), np.ones(B))
            writer.step(step._replace(final_obs=stacks(life, env, episode, t), final_value=np.ones(B)))
            episode, t = (episode + ended) % 1000, np.where(ended, 0, t)
        done.release()


def stacks(life, env, episode, t):
    """[B, STACK, WIDTH] float32"""
    back = np.arange(STACK)[::-1]
    life = np.broadcast_to(life, t.shape)
    whole = frame(life[:, None], env[:, None], episode[:, None], t[:, None] - back)
    return np.where((t[:, None] >= back)[..., None], whole, 0.0).astype(np.float32)


def check(batch):
    """Every transition follows from the newest number of its observation."""
    number = batch.obs[:, -1, 0].numpy().astype(int) - 1
    t, env, episode, life = number % 20, number // 20 % B, number // 20 // B % 1000, number // 20 // B // 1000
    length = episode_length(env, episode)
    ahead = np.minimum(N, length - t)
    terminated = (t + ahead == length) & (episode % 2 == 0)
    np.testing.assert_array_equal(batch.obs.numpy(), stacks(life, env, episode, t))
    np.testing.assert_array_equal(
        batch.next_obs.numpy(), stacks(life, env, episode, t + np.where(terminated, 0, ahead))
    )
    np.testing.assert_array_equal(batch.action.numpy(), t)
    rewards = [sum(GAMMA**i * (first + 1 + i) for i in range(m)) for first, m in zip(t, ahead, strict=True)]
    np.testing.assert_allclose(batch.reward.numpy(), rewards, rtol=1e-5)
    np.testing.assert_allclose(batch.discount.numpy(), np.where(terminated, 0.0, GAMMA**ahead), rtol=1e-5)
    return life


@pytest.mark.usefixtures("forked")
def test_a_writer_killed_at_random_instants_leaves_its_shard_usable():
    """Forty lives of an actor or more, all ended by SIGKILL in the middle of writing; another actor writes on."""
    context = mp.get_context("forkserver")  # no time for forty imports of torch; its parent has no threads to lose
    shards = Shards(2, B, ROWS, Box(-np.inf, np.inf, (STACK, WIDTH), np.float32), Discrete(20), STACK)
    replay, rng = Replay(shards, 0.6, 0), np.random.default_rng(0)
    room, processes = 2 * STEPS * 2, []  # two blocks may be in flight

    def start(shard, life):
        replay.make_room(shard, room)
        leave, done = context.Semaphore(2), context.Semaphore(0)
        processes.append(context.Process(target=write, args=(shards, shard, life, leave, done), daemon=True))
        processes[-1].start()
        return shard, leave, done

    def serve(shard, leave, done):
        """Give leave for another block for each that is done."""
        while done.acquire(block=False):
            replay.make_room(shard, room)
            leave.release()
        replay.ingest(shard)

    steady, lives, life = start(1, 0), set(), 0
    try:
        with Prefetch(replay, 64, 2) as batches:
            while life < 40 or (shards.written[:B] <= 2 * ROWS).any():  # until the lanes have wrapped around
                life += 1
                assert life < 200, "the lanes do not wrap around"
                mortal = start(0, life)
                born, seen = time.monotonic(), int(shards.committed[:B].min())
                ends = born + rng.uniform(0.0, 0.1)
                # every other life may end with its first rows, the rest once something of theirs has been drawn
                while time.monotonic() < ends or shards.committed[:B].min() == seen or (life % 2 and life not in lives):
                    assert time.monotonic() < born + 30, "the successor does not get on"
                    serve(*mortal)
                    serve(*steady)
                    if replay.size:
                        lives |= set(check(batches.next()))
                os.kill(processes[-1].pid, signal.SIGKILL)
                processes[-1].join()
                assert processes[-1].exitcode == -signal.SIGKILL, "it has not failed by itself"
        assert processes[0].is_alive()
        replay.ingest(0)
        for _ in range(50):
            lives |= set(check(replay.sample(64)))
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert 0 in lives, "of the odd ones the loop has seen something drawn"
