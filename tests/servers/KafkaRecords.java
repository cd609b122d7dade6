import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;

/** {@code KafkaRecords BOOTSTRAP COUNT}: appends so many records to the topic "kept", then prints how many it has. */
class KafkaRecords {
    public static void main(String[] arguments) throws Exception {
        String strings = "org.apache.kafka.common.serialization.String";
        Map<String, Object> properties = Map.of(
                "bootstrap.servers", arguments[0],
                "key.serializer", strings + "Serializer", "value.serializer", strings + "Serializer",
                "key.deserializer", strings + "Deserializer", "value.deserializer", strings + "Deserializer");
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(properties)) {
            for (int record = 0; record < Integer.parseInt(arguments[1]); record++) {
                producer.send(new ProducerRecord<>("kept", "key", "value")).get();
            }
        }
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(properties)) {
            List<TopicPartition> all = List.of(new TopicPartition("kept", 0));
            consumer.assign(all);
            long end = consumer.endOffsets(all).get(all.get(0)), seen = 0;
            consumer.seekToBeginning(all);
            while (consumer.position(all.get(0)) < end) seen += consumer.poll(Duration.ofSeconds(1)).count();
            System.out.println(seen);
        }
    }
}
