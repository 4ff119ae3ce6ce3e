"""Ports for torchelastic's Python API: workers that a program starts itself, and a rendezvous handler of torch."""
