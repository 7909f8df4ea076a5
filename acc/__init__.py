"""acc, the AutoCompress compiler: a smaller model that keeps its limits as measured in the serving engine."""

__version__ = "0.1.0"
