"""Tests of `reknit.elastic`. One file per module of torch."""
