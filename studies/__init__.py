"""What people quote without measuring, measured: ``python -m studies.scaling`` and ``python -m studies.context``."""
