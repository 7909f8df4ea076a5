"""Map the top-level folders passes/ and backends/ into the package as acc.passes and acc.backends."""

from setuptools import find_packages, setup

TOP = {"acc.passes": "passes", "acc.backends": "backends"}

setup(
    packages=[
        "acc",
        *(f"acc.{sub}" for sub in find_packages("acc", exclude=["passes*", "backends*"])),
        *TOP,
        *(f"{name}.{sub}" for name, folder in TOP.items() for sub in find_packages(folder)),
    ],
    package_dir={"acc": "acc", **TOP},
)
