import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;

/**
 * Waits for events: {@code CountEvents BOOTSTRAP TOPIC COUNT IDLE_SECONDS}. Creates the topic, prints "ready", and when
 * COUNT events can be consumed, or none has come for IDLE_SECONDS, a line of JSON: how many there were, distinct keys,
 * and when the first and the last one could be consumed, by the system's monotonic clock. They are consumed only
 * afterwards: so the measured program has the machine for itself.
 */
class CountEvents {
    public static void main(String[] arguments) throws Exception {
        String bytes = "org.apache.kafka.common.serialization.ByteArrayDeserializer", topic = arguments[1];
        Map<String, Object> properties =
                Map.of("bootstrap.servers", arguments[0], "key.deserializer", bytes, "value.deserializer", bytes);
        try (Admin admin = Admin.create(properties)) {
            admin.createTopics(List.of(new NewTopic(topic, 1, (short) 1))).all().get();
        }
        int wanted = Integer.parseInt(arguments[2]);
        long idle = Long.parseLong(arguments[3]) * 1_000_000_000, first = 0, last = System.nanoTime(), size = 0;
        List<byte[]> keys = new ArrayList<>(wanted);
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(properties)) {
            TopicPartition partition = new TopicPartition(topic, 0);
            consumer.assign(List.of(partition));
            consumer.seekToBeginning(List.of(partition));
            consumer.position(partition);
            System.out.println("ready");
            List<TopicPartition> partitions = List.of(partition);
            long there = 0;
            while (there < wanted && System.nanoTime() - last < idle) {
                Thread.sleep(20);
                long end = consumer.endOffsets(partitions).get(partition);
                if (end > there) last = System.nanoTime();
                if (end > 0 && first == 0) first = last;
                there = end;
            }
            while (keys.size() < there) {
                ConsumerRecords<byte[], byte[]> events = consumer.poll(Duration.ofSeconds(10));
                if (events.isEmpty()) break;
                for (ConsumerRecord<byte[], byte[]> event : events) {
                    keys.add(event.key());
                    size += event.value() == null ? 0 : event.value().length;
                }
            }
        }
        HashSet<String> distinct = new HashSet<>();
        for (byte[] key : keys) distinct.add(new String(key, "UTF-8"));
        System.out.printf(
                "{\"events\": %d, \"keys\": %d, \"bytes\": %d, \"first\": %.6f, \"last\": %.6f}%n",
                keys.size(), distinct.size(), size, first / 1e9, last / 1e9);
    }
}
