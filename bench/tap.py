"""Time calls of ``spile.tap``: ``python -m bench.tap --model build/real/smollm2`` (``make real`` makes that model).

The first call loads the model and compiles its program, and the next ones use both again.
"""

from __future__ import annotations

import argparse
import os
import time

import spile

_SENTENCES = [
    "The cat sat on the mat.",
    "Dogs bark at night.",
    "Seven green papers lay on the desk.",
    "It rained all day in the mountains.",
    "She reads a book every week.",
    "The train to Paris leaves at noon.",
    "Nobody knew the answer to the question.",
    "A small bird sang in the old tree.",
    "They built a house by the river.",
    "The quick brown fox jumps over the lazy dog.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--calls", type=int, default=4)
    words = parser.parse_args()
    for call in range(1, words.calls + 1):
        texts = [f"{text} {call}" for text in _SENTENCES]  # other texts of about the same length
        began, used = time.perf_counter(), time.process_time()
        acts = spile.tap(words.model, texts, taps="residual")
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        print(f"call {call}  {seconds:6.2f} s, {cpu:6.2f} CPU seconds on {os.cpu_count()} cores  {acts!r}")


if __name__ == "__main__":
    main()
