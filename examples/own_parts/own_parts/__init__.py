"""Parts of an experiment that live outside xformer."""
