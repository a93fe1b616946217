"""The tasks of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006) at published sizes, for an accelerator."""
