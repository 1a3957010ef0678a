"""The stored dataset of activations: file layout, encoding, writer, ledger, reader and verification."""
