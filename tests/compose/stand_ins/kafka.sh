#!/bin/bash
# As the original: each variable KAFKA_A_B is the setting a.b, and the folder of the data is formatted at the first start.
set -euo pipefail
file=/opt/kafka/server.properties
env | sed -n 's/^KAFKA_//p' | while IFS='=' read -r key value; do
  key="${key,,}"
  echo "${key//_/.}=$value"
done > "$file"
kafka=(java -Xms256m -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*')
"${kafka[@]}" kafka.tools.StorageTool format --ignore-formatted -t 5L6g3nShT-eMCtK--X86sw -c "$file"
exec "${kafka[@]}" kafka.Kafka "$file"
