"""What is timed. Outputs are proven right first; pytest-benchmark keeps the times, in one process."""
