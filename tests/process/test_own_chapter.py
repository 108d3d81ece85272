"""A chapter of one's own: a copy of chapter 1 with a setting, a field of its rollouts and a loss that are new."""

import torch
from envs import EPISODE_LENGTH
from harness import A3C_DATA, ROOT, scalars

CHANGES = {
    "import Rollout, minibatches": "import InfoField, Rollout, minibatches",
    '    chapter = "a3c_data"\n': """    chapter = "my_chapter"
    rollout_fields = {"angle": InfoField(), "engle": InfoField()}

    angle_coef: float = 0.5
    \'\'\'coefficient of the auxiliary loss\'\'\'
""",
    "    return total, metrics | {": """    angle_loss = (values - samples.extra["angle"]).square().mean()
    total, metrics["losses/angle"] = total + args.angle_coef * angle_loss, angle_loss
    return total, metrics | {""",
    "    for rollout in learner.rounds():\n": """    for rollout in learner.rounds():
        torch.save(rollout.map(torch.clone).fields(), f"rollout-{learner.steps}.pt")
""",
}


def test_a_copy_of_chapter_1_learns_from_a_field_that_it_adds(scripts):
    source = (ROOT / A3C_DATA.script).read_text()
    for old, new in CHANGES.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (copy := scripts.runs_dir / "my_chapter.py").write_text(source)
    flags = [*A3C_DATA.flags, "--env-id", "envs:Angle-v0", "--angle-coef", "0.25", "--total-steps", "1000"]
    done = scripts.finish(scripts.start(str(copy), "--run-name", "r", *flags), "r")
    assert done.code == 0, done.out + done.err
    assert (done.out + done.err).count("infos have no engle so far: these rollout_fields are 0") == 1
    assert done.config["algorithm"] == "my_chapter"
    assert done.config["args"]["angle_coef"] == 0.25
    assert done.summary["updates"] > 0 == done.not_finite
    angle_losses = [event.value for event in scalars(done.folder)["losses/angle"]]
    assert angle_losses
    ended = 0
    for path in scripts.runs_dir.glob("rollout-*.pt"):
        rollout = torch.load(path)
        episode, step = rollout["obs"][:-1].unbind(-1)
        expected = torch.where(step == 0, 0, 10 * episode + step + 1)  # in the first step of an episode infos lack it
        assert torch.equal(rollout["angle"], expected)
        ended += (rollout["truncated"] & (step == EPISODE_LENGTH - 1)).all(dim=1).sum()
    assert ended > 0, "all environments were truncated in one step"
