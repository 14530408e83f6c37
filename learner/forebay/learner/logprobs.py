"""Log-probabilities of chosen tokens without the logits of a whole batch: the head runs in chunks, twice.

Only one chunk of logits [chunk, vocabulary] exists at a time; backward computes them again. Sums over the vocabulary
are float32 whatever the model computes in.

Shape suffixes: t targets, c targets of a chunk, e hidden size, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

#: Targets whose logits exist at once.
CHUNK = 1024
#: Logit of a token outside the nucleus: no probability, and yet finite, so that 0 times it is 0.
EXCLUDED = -1e30


def selected_logprobs(
    hidden_te: torch.Tensor,
    weight_ve: torch.Tensor,
    target_t: torch.Tensor,
    temperature_t: torch.Tensor,
    top_p_t: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of the processed distribution at each target, both float32 [t].

    Processed as the behaviour policy was: logits divided by the temperature, then, where `top_p_t` < 1, renormalised
    over the smallest set of tokens with that mass. The target always belongs to the set, so a ratio stays finite.
    The set itself is held constant in backward.
    """
    return _SelectedLogprobs.apply(hidden_te, weight_ve, target_t, temperature_t, top_p_t, chunk)  # type: ignore[no-untyped-call, no-any-return]


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_te: torch.Tensor,
        weight_ve: torch.Tensor,
        target_t: torch.Tensor,
        temperature_t: torch.Tensor,
        top_p_t: torch.Tensor | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden_te, weight_ve, target_t, temperature_t, top_p_t)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        logprob_t = torch.empty(len(target_t), dtype=_sum_dtype(hidden_te), device=hidden_te.device)
        entropy_t = torch.empty_like(logprob_t)
        for part in _parts(len(target_t), chunk):
            target_c1 = target_t[part, None]
            logprobs_cv = _log_softmax(hidden_te[part], weight_ve, target_c1, temperature_t[part], _cut(top_p_t, part))
            logprob_t[part] = logprobs_cv.gather(1, target_c1)[:, 0]
            entropy_t[part] = -torch.linalg.vecdot(logprobs_cv.exp(), logprobs_cv)
        return logprob_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_te, weight_ve, target_t, temperature_t, top_p_t = ctx.saved_tensors
        grad_hidden_te = torch.empty_like(hidden_te)
        grad_weight_ve = torch.zeros_like(weight_ve) if ctx.needs_input_grad[1] else None  # a frozen head has none
        for part in _parts(len(target_t), ctx.chunk):
            target_c1 = target_t[part, None]
            logprobs_cv = _log_softmax(hidden_te[part], weight_ve, target_c1, temperature_t[part], _cut(top_p_t, part))
            grad_cv = _logits_gradient(logprobs_cv, target_c1, *(_column(grad, part) for grad in grads))
            grad_cv = grad_cv.div_(temperature_t[part, None]).to(hidden_te.dtype)
            torch.mm(grad_cv, weight_ve, out=grad_hidden_te[part])
            if grad_weight_ve is not None:
                grad_weight_ve.addmm_(grad_cv.T, hidden_te[part])
        return grad_hidden_te, grad_weight_ve, None, None, None, None


def _logits_gradient(
    logprobs_cv: torch.Tensor,
    target_c1: torch.Tensor,
    grad_logprob_c1: torch.Tensor | None,
    grad_entropy_c1: torch.Tensor | None,
) -> torch.Tensor:
    """d log p(target) / d z = onehot - p;  d entropy / d z = -p (log p + entropy). Overwrites its first argument."""
    probs_cv = logprobs_cv.exp()
    if grad_entropy_c1 is None:
        gradient_cv = torch.zeros_like(probs_cv)
    else:
        entropy_c1 = -torch.linalg.vecdot(probs_cv, logprobs_cv)[:, None]
        spread_cv = logprobs_cv.masked_fill_(probs_cv == 0, 0).add_(entropy_c1)
        gradient_cv = spread_cv.mul_(probs_cv).mul_(-grad_entropy_c1)
    if grad_logprob_c1 is None:
        return gradient_cv
    gradient_cv.addcmul_(probs_cv, grad_logprob_c1, value=-1)
    return gradient_cv.scatter_add_(1, target_c1, grad_logprob_c1)


def _log_softmax(
    hidden_ce: torch.Tensor,
    weight_ve: torch.Tensor,
    target_c1: torch.Tensor,
    temperature_c: torch.Tensor,
    top_p_c: torch.Tensor | None,
) -> torch.Tensor:
    logits_cv = (hidden_ce @ weight_ve.T).to(_sum_dtype(hidden_ce))
    logits_cv.div_(temperature_c[:, None])
    if top_p_c is not None:
        logits_cv.masked_fill_(_outside_nucleus(logits_cv, target_c1, top_p_c), EXCLUDED)
    return torch.log_softmax(logits_cv, dim=1)


def _outside_nucleus(logits_cv: torch.Tensor, target_c1: torch.Tensor, top_p_c: torch.Tensor) -> torch.Tensor:
    """True for tokens that nucleus sampling never draws; never for the target."""
    sorted_cv, order_cv = torch.softmax(logits_cv, dim=1).sort(dim=1, descending=True)
    above_cv = sorted_cv.cumsum(dim=1).sub_(sorted_cv)
    outside_cv = torch.empty_like(above_cv, dtype=torch.bool).scatter_(1, order_cv, above_cv >= top_p_c[:, None])
    return outside_cv.scatter_(1, target_c1, False)


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _parts(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def _cut(x_t: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if x_t is None else x_t[part]


def _column(grad_t: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if grad_t is None else grad_t[part, None]
