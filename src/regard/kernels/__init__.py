"""The kernels: ``reference`` is the definition, the others are optimisations of it."""
