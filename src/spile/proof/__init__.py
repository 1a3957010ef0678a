"""Proofs about stored datasets: verification, recomputation and repair."""
