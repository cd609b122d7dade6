"""The flights that left New York City in 2013: a Cassandra data set for the demo, the tests and the benchmarks."""
