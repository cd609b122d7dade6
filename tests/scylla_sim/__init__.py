"""A ScyllaDB cluster that writes CDC logs, without a server.

``cluster``      nodes, clocks, generations, what a coordinator accepts; a write gives deliveries of log rows
``tablets``      the stream sets of tables with tablets: split, merge, collection
``metadata``     the tables that tell clients of streams, as they are visible
``log``          the log in memory
``tables``       base tables and their CQL types; ``workload``: random mutations of them
``base_model``   base tables by last write wins, from mutations and from log rows
``load``         all of it under random writes: begin there
``materialise``  the same in a real Cassandra; ``statements``: mutations as CQL
``queries``      what reading a big cluster costs

Everything follows docs/scylla.md; no ScyllaDB server has confirmed it. What is a choice of this simulator: the
start of a range in a descending column is its greatest value, as in the order of the clustering; a row's TTL in the log
counts from its coordinator's clock; an empty generation refuses writes.
"""
