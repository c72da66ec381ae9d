"""Speed and memory against the bars, as ratios inside one run: `python -m benchmarks`."""
