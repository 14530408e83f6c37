"""What each idea brings: forward and backward of one batch, with one idea after the other taken away.

`python -m benchmarks.learner_load.variants CASE ROUNDS`, float32. `ours`: packed, each prompt once, log-probabilities
in chunks. `prompts_repeated`: packed, but each reply with a prompt of its own. `padded`: a rectangle of right-padded
sequences through transformers' own attention, log-probabilities still in chunks. `full_logits`: the same, and the
logits of the whole micro-batch at once.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.learner_load.recorded import CASES, Case
from forebay.cli.threads import settle_own_threads
from forebay.wire.trajectory import Trajectory


def main(argv: Sequence[str]) -> None:
    """Time every variant by turns, print seconds of each."""
    settle_own_threads(alone=True)
    case = CASES[argv[0]]
    variants, seconds = _variants(case), dict[str, list[float]]()
    for _ in range(int(argv[1])):
        for name, variant in variants.items():
            began = time.monotonic()
            variant()
            seconds.setdefault(name, []).append(time.monotonic() - began)
    print(json.dumps({name: round(statistics.median(some), 2) for name, some in seconds.items()}), flush=True)


def _variants(case: Case) -> dict[str, Callable[[], None]]:
    from transformers import AutoModelForCausalLM

    from forebay.learner.pretrained import load_model

    run, trajectories = case.run("float32"), case.trajectories()
    alone = [replace(member, group_id=number) for number, member in enumerate(trajectories)]
    packed: Any = load_model(run.model.path)
    plain: Any = AutoModelForCausalLM.from_pretrained(run.model.path, dtype="float32", attn_implementation="sdpa")
    rows = case.sequences_per_microbatch
    return {
        "ours": lambda: _packed(packed, trajectories, case.tokens_per_microbatch),
        "prompts_repeated": lambda: _packed(packed, alone, case.tokens_per_microbatch),
        "padded": lambda: _padded(plain, trajectories, rows, full_logits=False),
        "full_logits": lambda: _padded(plain, trajectories, rows, full_logits=True),
    }


def _packed(model: Any, trajectories: Sequence[Trajectory], limit: int) -> None:
    from forebay.learner.packing import pack
    from forebay.learner.policy import Policy
    from forebay.learner.sample import with_advantage

    policy = Policy(model)
    model.zero_grad()
    for batch in pack([with_advantage(member, 1.0) for member in trajectories], limit):
        policy(batch)[0].sum().backward()


def _padded(model: Any, trajectories: Sequence[Trajectory], rows: int, *, full_logits: bool) -> None:
    import torch

    from forebay.learner.logprobs import selected_logprobs

    model.zero_grad()
    for start in range(0, len(trajectories), rows):
        members = trajectories[start : start + rows]
        ids_bn, is_target_bn, is_token_bn = _rectangle(members)
        hidden_bne = model.base_model(input_ids=ids_bn, attention_mask=is_token_bn).last_hidden_state[:, :-1]
        if full_logits:
            logprob_bnv = model.get_output_embeddings()(hidden_bne).log_softmax(-1)
            logprob_bn = logprob_bnv.gather(2, ids_bn[:, 1:, None])[..., 0]
            logprob_bn[is_target_bn[:, 1:]].sum().backward()
        else:
            target_t = ids_bn[:, 1:][is_target_bn[:, 1:]]
            weight = model.get_output_embeddings().weight
            hidden_te = hidden_bne[is_target_bn[:, 1:]]
            logprob_t, _ = selected_logprobs(hidden_te, weight, target_t, torch.ones(len(target_t)))
            torch.autograd.backward(logprob_t.sum())


def _rectangle(members: Sequence[Trajectory]) -> tuple[Any, Any, Any]:
    """Token ids, which of them are generated, and which are no padding: each [b, n], padded on the right."""
    import torch

    texts = [[*member.prompt_tokens, *member.tokens] for member in members]
    width = max(map(len, texts))
    ids = torch.tensor([[*map(int, text), *[0] * (width - len(text))] for text in texts])
    column = torch.arange(width)
    starts = torch.tensor([[len(member.prompt_tokens)] for member in members])
    ends = torch.tensor([[len(text)] for text in texts])
    return ids, (column >= starts) & (column < ends), (column < ends).long()


if __name__ == "__main__":
    main(sys.argv[1:])
