"""Measuring: workloads, timing, rows and plots. Nothing here changes how anything behaves."""
