"""The commands: train a run, compare variants, inspect a config, measure speed. The only place that reads flags."""
