"""The cloud as the fleet sees it: the provider protocol, and Cloud TPU over REST."""
