"""What pyproject.toml cannot say: two folders of a checkout that lie inside the package once it is installed."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["xformer", "xformer.*"]),
        "xformer.configs",
        "xformer.configs.lra",
        "xformer.examples",
    ],
    package_dir={"xformer.configs": "configs", "xformer.configs.lra": "configs/lra", "xformer.examples": "examples"},
    package_data={"xformer": ["py.typed"], "xformer.report": ["*.j2"], "xformer.examples": ["*.jsonl"]},
)
