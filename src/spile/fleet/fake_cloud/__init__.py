"""A local stand-in for the Cloud TPU API, good enough for clients that we did not write.

``cloud`` is what the cloud knows, with a clock of its own; ``api`` is its REST face; ``vms`` makes its machines real
processes; ``server`` puts it on a port, beside admin calls that preempt, run out of stock and quota, and lose replies.
"""
