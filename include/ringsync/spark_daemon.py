"""Parent of Spark's Python workers: it loads the kernels before it forks them (``spark.python.daemon.module``).

A worker that imports numba and links the compiled kernels itself takes a second or two of CPU; a fork of this process
takes none. Spark also starts such a parent for each step of planning a data source: these need no kernels.
"""

import sys

from pyspark.daemon import manager

if sys.argv[1:] == ["pyspark.worker"]:
    import ringsync.sources.cassandra_table
    import ringsync.sources.scan.scan  # noqa: F401
    from ringsync.installed import installed
    from ringsync.warm import warm

    warm()
    installed()  # what this process has loaded, and its forks run, whatever is installed meanwhile

if __name__ == "__main__":
    manager()
