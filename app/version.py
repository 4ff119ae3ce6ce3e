"""The version of reknit. It stands alone, so that whatever asks for it imports nothing else."""

__version__ = "0.1.0"
