"""What makes datasets: sources, the hub, conversion, splitting into streams, upload."""
