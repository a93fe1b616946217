"""What pyproject.toml cannot say: folders of a checkout that lie inside the package once it is installed."""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {"xformer.configs": "configs", "xformer.configs.lra": "configs/lra", "xformer.examples": "examples"}
if Path("benchmarks/results/devices").is_dir():
    FOLDERS["xformer.devices"] = "benchmarks/results/devices"

setup(
    packages=[*find_packages(include=["xformer", "xformer.*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={
        "xformer": ["py.typed"],
        "xformer.report": ["*.j2"],
        "xformer.examples": ["*.jsonl"],
        "xformer.devices": ["*.json", "README.md"],
    },
)
