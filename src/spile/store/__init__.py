"""What a dataset of activations is on disk: layout, codec, writer, ledger, reader, proof."""
