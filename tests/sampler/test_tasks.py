"""Tasks: distinct prompts, no overlap, errors that say what to do; and the order in which groups visit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.models import TaskSection
from forebay.errors import UsageError
from forebay.sampler.tasks import load_task
from forebay.sampler.tasks.answers import AnswerExtractor
from forebay.sampler.tasks.order import prompt_index

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def section(name: str, **changes: Any) -> TaskSection:
    return TaskSection.model_validate({"name": name, "train_prompts": 20, "heldout_prompts": 10, **changes})


def test_gym_parts_are_distinct_disjoint_and_deterministic() -> None:
    chosen = section("reasoning-gym:chain_sum", options=ONE_DIGIT, train_prompts=100, heldout_prompts=40)
    first, again, other = load_task(chosen, 1), load_task(chosen, 1), load_task(chosen, 2)
    train, heldout = ({q.text for q in side} for side in (first.train, first.heldout))
    assert (len(train), len(heldout), len(train & heldout)) == (100, 40, 0)
    assert [q.text for q in first.train] == [q.text for q in again.train]
    assert [q.text for q in first.train] != [q.text for q in other.train]


def test_gym_heldout_part_does_not_depend_on_how_many_are_trained_on() -> None:
    few, many = (load_task(section("reasoning-gym:chain_sum", train_prompts=n), 1).heldout for n in (5, 50))
    assert [q.text for q in few] == [q.text for q in many]


def test_gym_scores_the_bare_answer() -> None:
    task = load_task(section("reasoning-gym:chain_sum", options=ONE_DIGIT), 1)
    question = task.train[0]
    assert task.score(question, question.reference["answer"]).reward == 1.0
    assert task.score(question, "no idea").reward < 0.1


def test_gym_says_how_many_prompts_there_are() -> None:
    chosen = section("reasoning-gym:chain_sum", options=ONE_DIGIT, train_prompts=5000)
    with pytest.raises(UsageError, match=r"has only \d+ distinct prompts .* is 5010: lower them"):
        load_task(chosen, 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning-gym:chain_sun", {}, 'did you mean "reasoning-gym:chain_sum"'),
        ("reasoning-gym:chain_sum", {"min_termz": 2}, "its options are .*min_terms"),
        ("chain_sum", {}, "expected reasoning-gym:TASK, jsonl:FILE or package.module:factory"),
        ("tests.sampler.no_such:task", {}, "no module named tests.sampler.no_such"),
        ("tests.sampler.letters:tusk", {}, "letters has no tusk"),
        ("tests.sampler.letters:Question", {}, None),
        ("jsonl:/no/such/file.jsonl", {}, "cannot be read"),
        ("jsonl:x", {"prompt_kay": "q"}, "did you mean prompt_key"),
    ],
)
def test_mistakes_are_one_line_usage_errors(name: str, options: dict[str, Any], message: str | None) -> None:
    if message is None:
        with pytest.raises((UsageError, TypeError)):
            load_task(section(name, options=options), 1)
        return
    with pytest.raises(UsageError, match=message) as raised:
        load_task(section(name, options=options), 1)
    assert "\n" not in str(raised.value)


def test_jsonl_reads_keys_and_scores_mathematics(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "".join(json.dumps({"q": f"half of {n}?", "a": rf"\frac{{{n}}}{{2}}"}) + "\n" for n in range(1, 61))
    )
    task = load_task(section(f"jsonl:{file}", options={"prompt_key": "q", "answer_key": "a"}), 3)
    assert len({q.text for q in (*task.train, *task.heldout)}) == 30
    question = next(q for q in task.train if q.metadata["line"] % 2 == 0)
    half = question.metadata["line"] // 2
    assert task.score(question, f"${half}$").reward == 1.0
    assert task.score(question, f"${half + 1}$").reward == 0.0


def test_jsonl_counts_distinct_prompts_and_names_bad_lines(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n' * 50)
    with pytest.raises(UsageError, match="has 1 distinct prompts"):
        load_task(section(f"jsonl:{file}"), 1)
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    with pytest.raises(UsageError, match='line 2: expected a JSON object with "prompt" and "answer"'):
        load_task(section(f"jsonl:{file}"), 1)


def test_factory_with_overlap_or_too_few_is_refused() -> None:
    with pytest.raises(UsageError, match="5 prompts are trained on and held out as well"):
        load_task(section("tests.sampler.letters:task", options={"heldout_from": 15}), 1)
    with pytest.raises(UsageError, match=r"has 7 distinct train prompts, task\.train_prompts is 20"):
        load_task(section("tests.sampler.letters:task", options={"train": 7}), 1)


@pytest.mark.parametrize(
    ("pattern", "stop", "reply", "answer"),
    [
        (None, [], " 42 \n", "42"),
        (r"-?\d+", [], "3 plus 4 is 7.", "7"),
        (r"<answer>(.*?)</answer>", [], "<answer>1</answer> no, <answer> 2 </answer>", "2"),
        (r"\d+", [], "I do not know", ""),
        (r"\d+", ["\n"], "7\n8", "7"),
    ],
)
def test_last_match_is_the_answer(pattern: str | None, stop: list[str], reply: str, answer: str) -> None:
    assert AnswerExtractor(pattern, stop)(reply) == answer


def test_bad_answer_pattern_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        AnswerExtractor("(")


@given(size=st.integers(1, 300), seed=st.integers(-5, 2**40), epoch=st.integers(0, 5))
def test_each_epoch_visits_every_prompt_once(size: int, seed: int, epoch: int) -> None:
    visited = [prompt_index(epoch * size + n, size, seed) for n in range(size)]
    assert sorted(visited) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own_and_keep_them() -> None:
    orders = [[prompt_index(epoch * 50 + n, 50, seed) for n in range(50)] for epoch in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert [prompt_index(n, 1000, 7) for n in range(6)] == [prompt_index(n, 1000, 7) for n in range(6)]
    with pytest.raises(ValueError, match="group_id >= 0"):
        prompt_index(-1, 10, 0)
