"""Kernels, one folder an operation: a public function, its plain reference, one file a backend."""
