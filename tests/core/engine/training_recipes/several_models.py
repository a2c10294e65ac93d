"""Several models, and several forwards before a backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.engine.training_recipes.session import MLP, WIDTH, Net, Session, recipe, recomputed, sgd


@recipe
def adversarial(session: Session) -> None:
    """One graph of the generator: cut for the discriminator's step, whole for its own."""
    maker, judge = Net(), Net(out=1)
    for model in (maker, judge):
        session.shard(model, *model.blocks)
    makes, judges = sgd(maker), sgd(judge)
    for _ in range(3):
        made = maker(session.batch())
        (F.softplus(judge(made.detach())) + F.softplus(-judge(session.batch()))).mean().backward()
        session.step(judges, judge)
        F.softplus(-judge(made)).mean().backward()
        session.step(makes, maker)
        judges.zero_grad()


@recipe
def adversarial_with_a_frozen_judge_and_a_penalty(session: Session) -> None:
    maker, judge = Net(), Net(out=1)
    for model in (maker, judge):
        session.shard(model, *model.blocks)
    makes, judges = sgd(maker), sgd(judge)
    for _ in range(3):
        judge.requires_grad_(True)
        with torch.no_grad():
            made = maker(session.batch())
        mixed = (0.3 * session.batch() + 0.7 * made).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        (judge(made).mean() - judge(session.batch()).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        session.step(judges, judge)
        judge.requires_grad_(False)
        (-judge(maker(session.batch())).mean()).backward()
        session.step(makes, maker)


@recipe
def cycle_of_two_models(session: Session) -> None:
    there, back = Net(), Net()
    for model in (there, back):
        session.shard(model, *model.blocks)
    optimizer = sgd(there, back)
    for _ in range(3):
        x, y = session.batch(), session.batch()
        ((back(there(x)) - x).abs() + (there(back(y)) - y).abs() + (there(y) - y).abs()).mean().backward()
        session.step(optimizer, there, back)


@recipe
def contrastive_recomputed(session: Session) -> None:
    model = Net()
    model.run = recomputed
    session.shard(model, *model.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        one, other = (F.normalize(model(session.batch()), dim=1) for _ in range(2))
        F.cross_entropy(one @ other.t() / 0.1, torch.arange(8)).backward()
        session.step(optimizer, model)


@recipe
def contrastive_in_parts(session: Session) -> None:
    """Embeddings without a graph, the gradient of their loss, then a forward and a backward for each part."""
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        parts = [session.batch(4, WIDTH) for _ in range(3)]
        with torch.no_grad():
            found = torch.cat([model(part) for part in parts])
        found.requires_grad_()
        F.cross_entropy(found @ found.t(), torch.arange(12)).backward()
        assert found.grad is not None
        for index, (part, gradient) in enumerate(zip(parts, found.grad.split(4), strict=True)):
            session.sync(model, index == 2)
            (model(part) * gradient).sum().backward()
        session.step(optimizer, model)


@recipe
def slow_teacher(session: Session) -> None:
    student, teacher = Net(), Net()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    for model in (student, teacher):
        session.shard(model, *model.blocks)
    optimizer = sgd(student)
    for _ in range(3):
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new.detach(), 0.2)
            keys = teacher(session.batch())
        F.cross_entropy(student(session.batch()) @ keys.t(), torch.arange(8)).backward()
        session.step(optimizer, student, teacher)


@recipe
def averaged_weights_swapped_in(session: Session) -> None:
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        model(session.batch()).square().mean().backward()
        session.step(optimizer, model)
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        torch._foreach_lerp_(average, trained, 0.3)
        for values in (average, trained):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)
            with torch.set_grad_enabled(values is trained):
                session.note("evaluation", model(session.batch()))


@recipe
def distillation_through_hooks(session: Session) -> None:
    teacher, student = Net(3), Net()
    teacher.requires_grad_(False).eval()
    found: dict[str, Tensor] = {}
    teacher.blocks[1].register_forward_hook(lambda module, args, output: found.update(teacher=output))
    student.blocks[0].register_forward_hook(lambda module, args, output: found.update(student=output))
    for model in (teacher, student):
        session.shard(model, *model.blocks)
    optimizer = sgd(student)
    for _ in range(3):
        x = session.batch()
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loss = F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")
        (loss + (found["student"] - found["teacher"]).square().mean()).backward()
        session.step(optimizer, student)


@recipe
def policy_and_its_past(session: Session) -> None:
    """Generates without grad, asks the old policy and a reference, then makes several steps."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(20, WIDTH), MLP(), nn.Linear(WIDTH, 20, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embed(tokens).cumsum(1) / 3)).log_softmax(-1)  # type: ignore[no-any-return]

    policy, reference = Policy(), Policy().requires_grad_(False)
    for model in (policy, reference):
        session.shard(model, model.body)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):
        tokens = session.labels(20, 4, 2)
        with torch.no_grad():
            for _ in range(3):
                tokens = torch.cat([tokens, policy.eval()(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
            old, other = (model(tokens).gather(-1, tokens[..., None]) for model in (policy, reference))
        for rows in (slice(0, 2), slice(2, 4)):
            new = policy.train()(tokens[rows]).gather(-1, tokens[rows][..., None])
            gain = torch.sin(tokens[rows][..., None].to(new.dtype))
            (-((new - old[rows]).exp() * gain).mean() + 0.1 * (new - other[rows]).mean()).backward()
            session.note("norm", torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5))
            session.step(optimizer, policy)
