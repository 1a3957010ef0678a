"""A run spec with its model, tokenizer and data found and checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spile.compute.batches import Sizes
from spile.compute.sizes import choose_sizes
from spile.data.samples import SampleStream
from spile.data.tokens import Tokenizer
from spile.models import model_files
from spile.models.decoder import Steering
from spile.objects.folder import Folder
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.lengths import PromptLengths
from spile.spec.run import RunSpec
from spile.spec.taps import Tap, TapRows, row_bytes
from spile.store.ledger import Ledger


@dataclass(frozen=True)
class ResolvedRun:
    """What a spec names, found and checked."""

    spec: RunSpec
    """With backend and dtype chosen."""
    root: Folder
    files: model_files.ModelFiles
    taps: tuple[Tap, ...]
    rows: tuple[TapRows, ...]
    samples: SampleStream
    identity: RunIdentity
    stream_identity: StreamIdentity
    tokenizer: Tokenizer
    steering: Steering | None = None

    @cached_property
    def lengths(self) -> PromptLengths | None:
        """The lengths of some prompts, measured before the run; None for packed sequences."""
        return self.samples.measure()

    @property
    def bytes_per_token(self) -> int:
        """What one token takes in a shard."""
        return row_bytes(self.rows)

    @property
    def sizes(self) -> Sizes:
        """How much is computed, held and written at once."""
        return choose_sizes(self.spec, self.bytes_per_token, self.files.config)

    @property
    def token_limit(self) -> int | None:
        """The number of stored tokens at which the stream ends, if the spec limits them."""
        return self.spec.data.token_limit(self.bytes_per_token)

    def expected_samples(self, ledger: Ledger) -> int | None:
        """Return the number of samples that the stream must hold, if it is known before the stream is read."""
        return ledger.expected(self.stream_identity.samples, self.spec.data.sample_limit, self.token_limit)
