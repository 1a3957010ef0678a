"""What a limit of length does: forecast from a sample of prompts, and counted afterwards."""

from __future__ import annotations

from spile.spec.lengths import PromptLengths, cut_text


def test_the_sentence_says_what_a_limit_and_a_larger_one_do() -> None:
    found = PromptLengths([1000] * 2 + [8000] * 17 + [90_000], 2048, skips=False)
    assert found.sentence() == (
        "2,048 tokens: 90 % of prompts are longer and lose their end. "
        "8,192 keeps 95 % whole and takes 3.8 times the tokens."
    )
    assert found.quantiles() == "5 % 1,000, 25 % 8,000, 50 % 8,000, 75 % 8,000, 95 % 8,000, longest 90,000"
    skipping = PromptLengths(found.counted, 8192, skips=True, exact=False)
    assert skipping.sentence() == (
        "8,192 tokens: about 5 % of prompts are longer and are skipped. "
        "131,072 keeps 100 % whole and takes 1.7 times the tokens."
    )


def test_a_limit_that_keeps_all_prompts_whole_says_so() -> None:
    assert PromptLengths([5, 9], 9, skips=True).sentence() == "9 tokens: no prompt is longer; the longest of 2 has 9."
    counted = PromptLengths([5, 9], 2048, skips=False, exact=False).sentence()
    assert counted == "2,048 tokens: no prompt is longer; the longest of 2 counted has 9."
    assert PromptLengths([], 64, skips=False).sentence() == "64 tokens: no prompt is longer; the longest of 0 has 0."


def test_no_rounded_share_claims_all_or_none() -> None:
    many = PromptLengths([1] * 9999 + [100], 10, skips=False)
    assert "0.1 % of prompts" in many.sentence()
    assert "99.9 % of prompts" in PromptLengths([100] * 9999 + [1], 10, skips=False).sentence()
    nothing = PromptLengths([100], 10, skips=True).sentence()
    assert nothing == "10 tokens: 100 % of prompts are longer and are skipped. 128 keeps 100 % whole."


def test_what_was_cut_and_skipped_is_counted() -> None:
    assert cut_text(4, 0, 400, 2048) == "4 of 400 prompts were cut at 2,048 tokens"
    assert cut_text(0, 1, 400, 2048) == "1 of 400 prompts was skipped as longer than 2,048 tokens"
    assert cut_text(0, 0, 400, 2048) == ""
