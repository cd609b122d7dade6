#!/usr/bin/env bash
# Run Spark's own master or worker in the foreground: `spark.sh master`, `spark.sh worker`.
set -euo pipefail
export SPARK_NO_DAEMONIZE=1
case "$1" in
  master) exec "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.master.Master \
            --host spark-master --port 7077 --webui-port 8080 ;;
  worker) exec "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.worker.Worker \
            --webui-port 8081 --work-dir /tmp/spark-work spark://spark-master:7077 ;;
  *) echo "spark.sh: say master or worker" >&2; exit 3 ;;
esac
