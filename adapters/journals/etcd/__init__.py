"""A journal in etcd."""
