"""Heartbeats, and the snapshot made from them and the ledger."""
