"""Faults that a captured batch shows of itself, before anything is replayed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.audit.capture import Capture, Fault

_TOKEN_ARRAYS = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
APART = 0.05  # nats by token between sampler and trainer, on average, that bfloat16 (0.006) does not explain


def faults(capture: Capture) -> Iterator[Fault]:
    """Every fault of masks, log-probs, groups and experts."""
    yield from _masks(capture)
    yield from _log_probs(capture)
    shifts = list(_shifts(capture))
    yield from shifts
    if capture.has("sampler_logprobs") and not shifts:
        yield from _sampler(capture)
    yield from _groups(capture)
    yield from _experts(capture)


def metric_faults(capture: Capture) -> Iterator[Fault]:
    """A logged entropy that is neither the mean over tokens nor that over answers."""
    if capture.has("metric.entropy", "entropy"):
        logged, x, mask = float(capture["metric.entropy"]), capture["entropy"], capture.mask
        rows = mask.any(1)
        means = x[mask].mean(), (np.where(mask, x, 0).sum(1)[rows] / mask.sum(1)[rows]).mean()
        if all(abs(logged - mean) > 1e-3 * max(abs(mean), 1e-3) for mean in means):
            yield "metric_entropy", f"logged entropy is {logged:.5g}, its mean {means[0]:.5g}"


def _masks(capture: Capture) -> Iterator[Fault]:
    mask, rows = capture.mask, np.asarray(capture.mask.any(1))
    if capture.has("attention_mask"):
        attended = capture["attention_mask"][:, -mask.shape[1] :]
        outside, several = (mask & ~attended).sum(), attended.sum(1) > 1
        late = (attended.any(1) & (_first(mask) == _first(attended) + 1))[rows].all()
        if outside and late:
            yield "mask_shifted", f"mask begins one place after every answer, and counts {outside} places of padding"
        elif outside:
            yield "padding_in_mask", f"mask counts {outside} places that attention_mask calls padding"
        elif late and several.any():
            yield "first_token_left_out", "mask leaves out the first token of every answer"
        elif several.any() and (_last(mask) == _last(attended) - 1)[rows & several].all():
            yield (
                "eos_left_out",
                "mask leaves out the last attended token of every answer, EOS, or is shifted to the left",
            )
        if capture.has("tokens"):
            yield from _unattended_ends(capture["tokens"][:, -mask.shape[1] :], attended, rows)
    if capture.has("batch_tokens"):
        counted, told = mask.sum(), capture["batch_tokens"]
        alone = len(capture.get("batch_rewards", ())) == len(mask)
        if told < counted or (alone and told != counted):
            yield "batch_tokens_wrong", f"batch_tokens is {told:g}, and mask counts {counted} tokens"


def _unattended_ends(tokens: np.ndarray, attended: np.ndarray, rows: np.ndarray) -> Iterator[Fault]:
    """Answers whose EOS is neither attended nor counted: it stands where padding should begin, in every row."""
    last = _last(attended)
    at = np.flatnonzero(rows & (last >= 0) & (last < attended.shape[1] - 2))
    after, later = tokens[at, last[at] + 1], tokens[at, last[at] + 2]
    if len(at) > 1 and not np.ptp(after) and not np.ptp(later) and after[0] != later[0]:
        said = f"token {after[0]} stands behind every answer, before padding ({later[0]})"
        yield "eos_left_out", f"{said}, and is neither attended nor counted"


def _first(mask: np.ndarray) -> np.ndarray:
    return np.where(mask.any(1), mask.argmax(1), -5)


def _last(mask: np.ndarray) -> np.ndarray:
    return np.where(mask.any(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1), -9)


def _log_probs(capture: Capture) -> Iterator[Fault]:
    mask = capture.mask
    for name in filter(capture.has, _TOKEN_ARRAYS):
        counted = capture[name][mask]
        missing, above = ~np.isfinite(counted), counted > 1e-5
        if name != "sampler_logprobs" and missing.any():  # a sampler may have none to tell
            yield f"{name}_not_finite", f"{missing.sum()} of {len(counted)} counted are not finite"
        elif above.any():
            yield f"{name}_above_zero", f"{above.sum()} log-probs are above 0, up to {counted.max():.3g}"
    for name in filter(capture.has, ("reported_loss", "reported_dlogprobs")):
        if not np.isfinite(capture[name]).all():
            yield f"{name}_not_finite", f"{name} has entries that are not finite"
    if capture.has("reported_dlogprobs"):
        gradient = np.abs(capture["reported_dlogprobs"])
        outside = gradient[~mask]
        if outside.max(initial=0) > 1e-6 * max(gradient.max(), 1e-12):
            yield "gradient_outside_the_mask", f"{(outside > 0).sum()} places that mask leaves out have a gradient"
    if capture.has("update", "old_logprobs") and capture["update"] == 0:
        gap = np.abs(capture["logprobs"] - capture.old)[mask]
        if gap.max() > 1e-3:
            said = f"the log-ratio is up to {gap.max():.3g}, on average {gap.mean():.3g}"
            yield "first_ratio_not_one", f"at the first update {said}"


def moved(x: np.ndarray, by: int, fill: Any = np.nan) -> np.ndarray:
    """x[:, t - by] at t; `fill` at the places that nothing comes to."""
    out = np.roll(x, by, axis=1)
    if by:
        out[:, 0 if by > 0 else -1] = fill
    return out


def gap(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float:
    """The mean distance at the places of the mask where there is one; inf if there is none."""
    apart = np.abs(x - y)[mask]
    return float(np.mean(apart[np.isfinite(apart)])) if np.isfinite(apart).any() else np.inf


def _shifts(capture: Capture) -> Iterator[Fault]:
    """Log-probs that agree with others only once they are moved by one place."""
    mask, names = capture.mask, list(filter(capture.has, _TOKEN_ARRAYS))
    shifted: dict[str, int] = {}
    for name in names:
        for other in names[1:] if name == "logprobs" else names[:1]:
            for by in (-1, 1):
                late = moved(capture[name], by)
                here = gap(capture[name], capture[other], mask & np.isfinite(late))
                if here > 0.1 and gap(late, capture[other], mask) < 0.4 * here:
                    shifted.setdefault(name, by)
    others = [name for name in names[1:] if name in shifted]
    if "logprobs" in shifted and len(names) > 2 and len(others) == len(names) - 1:
        others = ["logprobs"]  # it disagrees with all others
    for name in others:
        side = "left" if shifted[name] > 0 else "right"
        yield (
            f"{name}_shifted",
            f"{name} agrees with the others once moved by one: it is one place too far to the {side}",
        )
    if capture.has("old_logprobs") and not others:
        zero = mask & (capture["logprobs"] == 0)
        edge = zero[:, 0] if zero[:, 0].sum() > 1 else zero[np.arange(len(mask)), np.maximum(_last(mask), 0)]
        if edge[mask.any(1)].all() and edge.sum() > 1:
            said = f"logprobs of {edge.sum()} answers are exactly 0 at one end"
            yield "logprobs_shifted", f"{said}, as they are after a shift by one"


def _sampler(capture: Capture) -> Iterator[Fault]:
    """Log-probs of the sampler that are too far from those of the old policy for rounding."""
    sampler, old = capture["sampler_logprobs"], capture.old
    mask = capture.mask & np.isfinite(sampler)
    apart = (old - sampler)[mask]
    if np.abs(apart).mean() <= APART:
        return
    told = f"the sampler is {np.abs(apart).mean():.3g} nats a token from the old log-probs, where bfloat16 gives 0.006"
    causes = (capture.advantages[mask], sampler[mask])  # shares of the gap's variance, as straight lines
    of_reward, of_level = (np.corrcoef(x, apart)[0, 1] ** 2 if np.ptp(x) and np.ptp(apart) else 0.0 for x in causes)
    if of_level > max(of_reward, 0.3):
        said = f"the gap follows the log-probs themselves (R^2 {of_level:.2f})"
        yield "temperature_missing", f"{told}; {said}, as it does where logits are not divided by the temperature"
    elif np.array_equal(old[mask], capture["logprobs"][mask]):
        said = "so they are of a later policy than the one that sampled, or the temperature is missing"
        yield "old_equals_now", f"old log-probs equal those of now to the bit, and {told}; {said}"
    else:
        yield "sampler_apart", f"{told}; no shift, and no temperature, explains it"


def _groups(capture: Capture) -> Iterator[Fault]:
    if capture.has("batch_group"):
        groups = capture["batch_group"]
        runs, sizes = 1 + (np.diff(groups) != 0).sum(), np.unique(groups, return_counts=True)[1]
        if runs != len(sizes):
            yield "groups_mixed", f"batch_group names {len(sizes)} groups in {runs} runs; those of a prompt are apart"
        elif np.ptp(sizes):
            yield "groups_uneven", f"groups have {sizes.min()} to {sizes.max()} answers"
    if capture.has("tokens", "group"):
        prompts = capture["tokens"][:, : -capture.mask.shape[1]]
        if capture.has("attention_mask"):
            prompts = np.where(capture["attention_mask"][:, : prompts.shape[1]], prompts, -1)
        told = {
            int(group): len(np.unique(prompts[capture["group"] == group], axis=0)) for group in set(capture["group"])
        }
        mixed = sorted(group for group, several in told.items() if several > 1)
        if mixed:
            several = max(told.values())
            yield "groups_mixed", f"groups {mixed} hold answers to up to {several} prompts each"


def _experts(capture: Capture) -> Iterator[Fault]:
    if capture.has("kept_tokens", "tokens"):
        kept, sampled = capture["kept_tokens"], capture["tokens"][:, -capture.mask.shape[1] :, None]
        out = (kept >= 0).any(-1) & capture.mask & ~(kept == sampled).any(-1)
        if out.any():
            yield "sampled_token_not_kept", f"{out.sum()} sampled tokens are not in the set that they were drawn from"
    if not capture.has("experts"):
        return
    chosen = np.sort(capture["experts"], -1)
    recorded = (chosen >= 0).any(-1)
    repeated = (recorded & (np.diff(chosen, axis=-1) == 0).any(-1)).sum()
    if repeated:
        yield "experts_repeated", f"{repeated} of {recorded.sum()} choices name an expert twice"
    if capture.has("router_logits"):
        logits, number = capture["router_logits"], capture["router_logits"].shape[-1]
        outside = (recorded & ((chosen < 0) | (chosen >= number)).any(-1)).sum()
        if outside:
            yield "experts_out_of_range", f"{outside} choices are not among {number} experts"
        elif logits.shape[:-1] == chosen.shape[:-1]:
            best = np.sort(np.argsort(-logits, -1)[..., : chosen.shape[-1]], -1)
            other = float((best != chosen).any(-1)[recorded].mean())
            if other > 0.01:
                yield "experts_not_of_the_router", f"{other:.0%} of choices are not the router's highest scores"
