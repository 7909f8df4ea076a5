"""Map the top-level folders passes/ and backends/ into the package as acc.passes and acc.backends."""

from setuptools import find_packages, setup

TOP = {"acc.passes": "passes", "acc.backends": "backends"}

setup(
    packages=[
        "acc",
        "acc.report",
        *TOP,
        *(f"{name}.{sub}" for name, folder in TOP.items() for sub in find_packages(folder)),
    ],
    package_dir={"acc": "acc", **TOP},
)
