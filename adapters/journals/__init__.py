"""The stores that can hold a job's journal."""
