"""The demo of a ScyllaDB table: its CDC log, messages and replica."""
