import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;

/**
 * Waits for events: {@code CountEvents BOOTSTRAP TOPIC COUNT IDLE_SECONDS}. Creates the topic, prints "ready", and when
 * COUNT events are there, or none has come for IDLE_SECONDS, a line of JSON: how many there were, distinct keys, and
 * when the first and the last one came, by the system's monotonic clock.
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
            while (keys.size() < wanted && System.nanoTime() - last < idle) {
                for (ConsumerRecord<byte[], byte[]> event : consumer.poll(Duration.ofMillis(100))) {
                    last = System.nanoTime();
                    if (first == 0) first = last;
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
