"""Speed and memory, measured side by side: timing, contenders, and the costs that reports show."""
